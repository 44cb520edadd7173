"""Keys from the key column of a dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from shardio.errors import PackError
from shardio.images import IMAGE_FORMATS
from shardio.packing.names import check_key

_OTHER_COLUMN = "Choose another --key-column (key_column), or none to number the records"


class Described(Protocol):
    """A dataset whose records have names in messages."""

    def describe(self, row: int) -> str: ...


def make_keys(
    records: Described,
    values: Sequence[object],
    *,
    rename_dots: bool,
    where: str = "in the key column",
    remedy: str = _OTHER_COLUMN,
) -> list[str]:
    """Return the keys of records, given the values of the key column.

    Args:
        records: Names the records in messages.
        values: Keys (``cats/0001``) or paths of images (``cats/0001.jpg``), one for each record.
        rename_dots: Whether each dot in the last part of a key becomes an underscore.
        where: Where the values are, for messages.
        remedy: What to do about an invalid key, for messages.

    Raises:
        PackError: If a value cannot be a key, or two records have the same key.
    """
    keys, rows = list[str](), dict[str, int]()
    for row, value in enumerate(values):
        try:
            key = check_key(_make_key(value, rename_dots=rename_dots))
        except (TypeError, ValueError) as error:
            raise PackError(
                f"{records.describe(row)} has {value!r} {where}, which cannot be a key: {error}. {remedy}; for dots, "
                "pass --rename-dots (rename_dots=True)"
            ) from error
        if (other := rows.setdefault(key, row)) != row:
            raise PackError(
                f"{records.describe(other)} and {records.describe(row)} have the same key {key!r}. {remedy}"
            )
        keys.append(key)
    return keys


def without_image_suffix(path: str) -> str:
    """Return a path without its suffix, if that is an image's."""
    stem, dot, suffix = path.rpartition(".")
    return stem if dot and suffix.lower() in IMAGE_FORMATS else path


def separate_equal_stems(paths: Sequence[str]) -> dict[str, str]:
    """Return the keys of images that have the same path but for the suffix, by path: a_jpg of a.jpg, a_png of a.png."""
    groups = defaultdict[str, set[str]](set)
    for path in paths:
        groups[without_image_suffix(path)].add(path)
    return {
        path: f"{stem}_{path[len(stem) + 1 :]}" for stem, group in groups.items() if len(group) > 1 for path in group
    }


def _make_key(value: object, *, rename_dots: bool) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        return value
    folder, slash, base = without_image_suffix(value).rpartition("/")
    return folder + slash + (base.replace(".", "_") if rename_dots else base)
