"""The names of tar members, which consist of a key and a field, as in WebDataset.

A member ``path/key.field`` belongs to sample ``path/key``; the key ends at the first dot of the base name.
Members of one sample are adjacent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Protocol, TypeVar

from shardio.errors import FormatError

LABEL_FIELD = "cls"
"""The field that holds a sample's label, in ASCII digits."""

_META_NAME = re.compile(r"__[^/]*__(/|$)")


def split_name(name: str) -> tuple[str, str] | None:
    r"""Split a member's name into key and field; return None if WebDataset would not read the member.

    The result is that of WebDataset's regular expression, ``((?:.*/)?[^.]+)\.([^/]*)``, which takes quadratic time for
    hostile names. So the field of ``x/.y`` is ``y``, and its key ends with the slash.

    >>> split_name("cats/0001.JPG")
    ('cats/0001', 'jpg')
    >>> split_name("cats/0001.seg.png")
    ('cats/0001', 'seg.png')
    >>> split_name("cats/README")
    """
    slash = name.rfind("/")
    dot = name.find(".", slash + 1)
    if dot < 0 or _META_NAME.match(name):
        return None
    if dot == slash + 1 and (slash < 0 or "." in name[name.rfind("/", 0, slash) + 1 : slash]):
        return None
    return name[:dot], name[dot + 1 :].lower()


def join_name(key: str, field: str) -> str:
    """Return the name of the member that holds ``field`` of the sample ``key``."""
    return f"{key}.{field}"


def is_added_by_macos(name: str) -> bool:
    """Return whether a file is one that macOS adds to folders: AppleDouble (``._x.jpg``) or ``.DS_Store``."""
    name = name.rpartition("/")[2]
    return name.startswith("._") or name == ".DS_Store"


class Member(Protocol):
    """A member of a tar, whose content begins at an offset."""

    @property
    def offset(self) -> int:
        """The offset of its content."""


Some = TypeVar("Some", bound=Member)


def group_members(tar: str, named: Iterable[tuple[tuple[str, str], Some]]) -> Iterator[tuple[str, dict[str, Some]]]:
    """Group adjacent members with the same key into samples.

    Args:
        tar: The tar's location, for messages.
        named: The members in tar order, each after its key and its field.

    Yields:
        The key of each sample, and its members by field.

    Raises:
        FormatError: If a sample has a field twice.
    """
    for key, members in groupby(named, lambda pair: pair[0][0]):
        fields: dict[str, Some] = {}
        for (_, field), member in members:
            if field in fields:
                raise FormatError(
                    f"{tar} holds field {field!r} of sample {key} twice, the second time at byte {member.offset}: "
                    "create the tar again without one of them"
                )
            fields[field] = member
        yield key, fields
