"""The splits of a dataset, such as train and val, as names of folders and files and values of columns say them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardio.errors import PackError
from shardio.shards import group_by_split, is_split, words_of

ALL_SPLITS = "all"
"""The choice of a split that packs all splits as one dataset."""


def split_of(column: str, value: Any) -> str | None:
    """Return the split that a value of a column names: "" if it is missing, None if it names none.

    A column such as ``is_train`` has 0 and 1, or false and true. Rows that are not for training are for tests, and rows
    that are not for tests or validation are for training.

    >>> split_of("set", "val"), split_of("is_train", 1), split_of("is_train", "0"), split_of("is_val", False)
    ('val', 'train', 'test', 'train')
    """
    if value in (None, ""):
        return ""
    if isinstance(value, str) and is_split(value):
        return value.strip()
    words = words_of(column)
    if words[:1] != ["is"] or not is_split("_".join(words[1:])):
        return None
    flag = {"1": True, "true": True, "0": False, "false": False}.get(str(value).lower().removesuffix(".0"))
    if flag is None:
        return None
    is_training = words[1].startswith("train")
    return "train" if flag == is_training else "test" if is_training else words[1]


def select_files(
    src: Path, paths: Sequence[Path], chosen: str | None, *, may_be_column: bool = False
) -> Sequence[Path]:
    """Return the files of a split whose names say it, such as train-0.tar.

    Args:
        src: The source.
        paths: All files.
        chosen: The split; None if none is chosen.
        may_be_column: Whether files without splits in their names may have a column that says it.

    Raises:
        PackError: If the files are of several splits, and none is chosen, or there is no such split.
    """
    splits = group_by_split(path.name for path in paths)
    if chosen is None and len(splits) > 1:
        raise _explain_choice(f"{src} holds files of the splits {', '.join(sorted(splits))}")
    if chosen in (None, ALL_SPLITS) or (may_be_column and not splits):
        return paths
    if chosen not in splits:
        there = f"it holds the splits {', '.join(sorted(splits))}" if splits else "omit the option"
        raise PackError(f"no file of {src} has {chosen!r} in its name, as --source-split says: {there}")
    return [path for path in paths if path.name in splits[chosen]]


class SplitColumn:
    """Finds the column of a table whose values are the names of splits, and selects the rows of one.

    Args:
        src: The table.
        chosen: The split; None if none is chosen.
        ignored: The columns of images, labels and keys.
    """

    def __init__(self, src: Path, chosen: str | None, ignored: Sequence[str | None]) -> None:
        self._src, self._chosen, self._ignored = src, chosen, ignored
        self._values: dict[str, set[str]] | None = None
        self._deciding = set[str]()

    def selects(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row is of the chosen split. Without a choice, all are."""
        if self._values is None:
            self._values = {name: set() for name in row if name not in self._ignored}
        for name in list(self._values):
            if (split := split_of(name, row.get(name))) is None:
                del self._values[name]
            elif split:
                self._values[name].add(split)
        if self._chosen in (None, ALL_SPLITS):
            return True
        found = [name for name in self._values if self._chosen == split_of(name, row.get(name))]
        self._deciding.update(found)
        return bool(found)

    def check(self, *, has_selected_files: bool = False) -> None:
        """Check that one split has been read, or all of them by choice.

        Args:
            has_selected_files: Whether the choice may have been one of files.

        Raises:
            PackError: Otherwise.
        """
        found = self._find_values()
        if self._chosen is None:
            if (mixture := self.describe_mixture()) is not None:
                raise _explain_choice(mixture)
        elif self._chosen != ALL_SPLITS and not (has_selected_files and not found):
            if not found:
                raise PackError(f"no column of {self._src} names the splits of its rows: omit --source-split")
            varying = {name for name, splits in found.items() if len(splits) > 1} or set(found)
            if len(varying) > 1 or self._deciding != varying:
                there = "; ".join(f"the column {name!r} has {', '.join(splits)}" for name, splits in found.items())
                raise PackError(f"--source-split {self._chosen} does not select rows of {self._src}: {there}")

    def describe_mixture(self) -> str | None:
        """Return which column says that the rows are of several splits; None if there is none."""
        for name, splits in self._find_values().items():
            if len(splits) > 1:
                return f"the column {name!r} of {self._src} says that rows are of the splits {', '.join(splits)}"
        return None

    def _find_values(self) -> dict[str, list[str]]:
        return {name: sorted(values) for name, values in (self._values or {}).items() if values}


def _explain_choice(what: str) -> PackError:
    return PackError(
        f"{what}. Pack each one, such as by --source-split train (source_split='train'), or all of them as one dataset "
        f"by --source-split {ALL_SPLITS}"
    )
