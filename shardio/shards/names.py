"""The names of tar members, which consist of a key and a field, as in WebDataset.

A member ``path/key.field`` belongs to sample ``path/key``; the key ends at the first dot of the base name.
WebDataset expects the members of a sample to be adjacent. Tars made without ``tar --sort=name`` may have them anywhere.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
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


def gather_members(tar: str, runs: Sequence[tuple[str, dict[str, Some]]]) -> list[tuple[str, dict[str, Some]]]:
    """Make one sample of all runs of adjacent members that have the same key.

    Runs of one key that all have the same fields stay separate samples, as WebDataset reads them.

    Args:
        tar: The tar's location, for messages.
        runs: The key of each run, and its members by field, in tar order.

    Returns:
        The key of each sample, and its members by field, in the order of the samples' first members.

    Raises:
        FormatError: If runs of one key have some fields in common, and others not.
    """
    counts = Counter(key for key, _ in runs)
    if len(counts) == len(runs):
        return list(runs)
    of_key = defaultdict[str, list[dict[str, Some]]](list)
    for key, fields in runs:
        if counts[key] > 1:
            of_key[key].append(fields)
    joined = {key: _join_runs(tar, key, found) for key, found in of_key.items()}
    samples = list[tuple[str, dict[str, Some]]]()
    for key, fields in runs:
        sample = joined.get(key)
        if sample is None:
            samples.append((key, fields))
        elif fields is of_key[key][0]:
            samples.append((key, sample))
    return samples


def _join_runs(tar: str, key: str, runs: Sequence[dict[str, Some]]) -> dict[str, Some] | None:
    """Return the members of several runs of one key as one sample; None if each run is a sample."""
    counts = Counter(field for run in runs for field in run)
    if len(counts) == counts.total():
        return {field: member for run in runs for field, member in run.items()}
    if set(counts.values()) == {len(runs)}:
        return None
    field = next(field for field, count in counts.items() if count > 1)
    first, second = [run[field].offset for run in runs if field in run][:2]
    raise FormatError(
        f"{tar} holds field {field!r} of sample {key} twice, at bytes {first} and {second}, and the sample's members "
        "are not adjacent, so it is unknown which belong together: create the tar again without one of the two"
    )
