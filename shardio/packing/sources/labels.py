"""Read labels, keys and splits from CSV, JSON Lines and Parquet tables."""

from __future__ import annotations

import csv
import io
import re
import threading
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import IMAGE_FORMATS
from shardio.packing.samples import check_key
from shardio.packing.sources.source import SHOWN, requiring
from shardio.process import hold_during_forks
from shardio.sample import number_classes
from shardio.shards import group_by_split, is_split, words_of
from shardio.storage import parse_location
from shardio.values import count, parse_json

ALL_SPLITS = "all"
"""The value of ``source_split`` that packs all splits as one dataset."""

Row = dict[str, Any]
"""The values of a row, by column. In CSV, all values are text."""

_OTHER_COLUMN = "Choose a different --key-column (key_column), or omit it to number the records"

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*|\.[0-9]+[eE][+-]?[0-9]+)?")
"""Matches integers as programs write them: pandas writes 3 as ``3.0``, numpy as ``3.000000000000000000e+00``."""


def split_of(column: str, value: Any) -> str | None:
    """Return the split that a value of a column names, "" if the value is missing, or None if it names no split.

    A column such as ``is_train`` contains 0 and 1, or false and true. Rows that are not for training are treated
    as test rows. Rows that are not for testing, or not for validation, are treated as training rows.

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
    src: Path, paths: Sequence[Path], chosen: str | None, *, may_be_column: bool = False, root: Path | None = None
) -> Sequence[Path]:
    """Return the files of a split. A name such as train-0.tar contains the name of the split.

    Args:
        src: The source.
        paths: All files.
        chosen: The split, or None if the user has not chosen a split.
        may_be_column: Whether files whose names contain no split may have a column of splits.
        root: The folder below which the names of folders may also contain the name of a split, as in train/0.txt.

    Raises:
        PackError: If the files belong to several splits and no split is chosen, or the chosen split does not exist.
    """
    names = [path.name if root is None else path.relative_to(root).as_posix() for path in paths]
    splits = group_by_split(names)
    if chosen is None and len(splits) > 1:
        raise _explain_choice(f"{src} holds files of the splits {', '.join(sorted(splits))}")
    if chosen in (None, ALL_SPLITS) or (may_be_column and not splits):
        return paths
    if chosen not in splits:
        there = f"it holds the splits {', '.join(sorted(splits))}" if splits else "omit the option"
        raise PackError(f"no file of {src} has the split {chosen!r} (--source-split) in its name: {there}")
    wanted = {*splits[chosen]}
    return [path for path, name in zip(paths, names, strict=True) if name in wanted]


class SplitColumn:
    """Finds the column of a table whose values are the names of splits, and selects the rows of one split.

    Args:
        src: The table.
        chosen: The split, or None if the user has not chosen a split.
        ignored: The columns of images, labels and keys.
    """

    def __init__(self, src: Path, chosen: str | None, ignored: Sequence[str | None]) -> None:
        self._src, self._chosen, self._ignored = src, chosen, ignored
        self._values: dict[str, set[str]] | None = None
        self._deciding = set[str]()

    def selects(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row belongs to the chosen split; True for all rows unless one split is chosen."""
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
        """Check that the rows belong to one split, or that the caller has chosen all splits.

        Args:
            has_selected_files: Whether the choice may have selected files rather than rows.

        Raises:
            PackError: If the rows belong to several splits, or the choice does not select rows.
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
        """Return a message about a column that assigns rows to several splits, or None if no column does."""
        for name, splits in self._find_values().items():
            if len(splits) > 1:
                return f"the column {name!r} of {self._src} says that rows belong to the splits {', '.join(splits)}"
        return None

    def _find_values(self) -> dict[str, list[str]]:
        return {name: sorted(values) for name, values in (self._values or {}).items() if values}


def _explain_choice(what: str) -> PackError:
    return PackError(
        f"{what}. Pack each split with an option such as --source-split train (source_split='train'), or all splits as "
        f"one dataset with --source-split {ALL_SPLITS}"
    )


class Described(Protocol):
    """A dataset that describes its records for messages."""

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
        records: The dataset, which describes its records for messages.
        values: Keys (``cats/0001``) or paths of images (``cats/0001.jpg``), one for each record.
        rename_dots: Whether each dot in the last part of a key becomes an underscore.
        where: A phrase that says where the values are, for messages.
        remedy: The remedy for an invalid key, for messages.

    Raises:
        PackError: If a value cannot be a key, or two records have the same key.
    """
    keys, rows = list[str](), dict[str, int]()
    for row, value in enumerate(values):
        try:
            key = check_key(_make_key(value, rename_dots=rename_dots))
        except (TypeError, ValueError) as error:
            raise PackError(
                f"{records.describe(row)} has {value!r} {where}, but it cannot be a key: {error}. {remedy}; for dots, "
                "pass --rename-dots (rename_dots=True)"
            ) from error
        if (other := rows.setdefault(key, row)) != row:
            raise PackError(
                f"{records.describe(other)} and {records.describe(row)} have the same key {key!r}. {remedy}"
            )
        keys.append(key)
    return keys


def without_image_suffix(path: str) -> str:
    """Return a path without its suffix, if the suffix is an image suffix."""
    stem, dot, suffix = path.rpartition(".")
    return stem if dot and suffix.lower() in IMAGE_FORMATS else path


def separate_equal_stems(paths: Sequence[str]) -> dict[str, str]:
    """Return a key for each path that differs from another only in its suffix: a_jpg for a.jpg, a_png for a.png."""
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


def read_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a table.

    Args:
        path: The table, whose suffix is one of ``TABLE_SUFFIXES``.
        columns: The columns that the caller needs, or None for all. Rows may have more columns than these.

    Raises:
        PackError: If a package is missing.
        OSError, ValueError, csv.Error: If the table cannot be read.
    """
    return _READERS[path.suffix.lower()](path, columns)


def _read_csv(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    rows = _split_csv(_decode(parse_location(path).read_whole()))
    names = [name.strip() for name in next(rows, ())]
    if twice := sorted(name for name, number in Counter(names).items() if number > 1):
        raise ValueError(f"two columns have the name {twice[0]!r}: rename one of them")
    for number, values in enumerate(rows, 1):
        if len(values) != len(names):
            raise ValueError(f"row {number} has more or fewer values than the header has columns")
        yield dict(zip(names, values, strict=True))


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-16" if content.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not in UTF-8 ({error}): save it in UTF-8") from error


def _split_csv(text: str) -> Iterator[list[str]]:
    # In many countries, Excel separates columns with semicolons.
    header = text[: text.find("\n")]
    delimiter = next((letter for letter in ",;\t" if letter in header), ",")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=delimiter)
    while rows := _read_some(reader, len(text)):
        yield from filter(None, rows)


def _read_some(reader: Iterator[list[str]], longest: int) -> list[list[str]]:
    """Return the next rows. The csv module's limit on field sizes is process-wide, so it is raised only here."""
    with _limit_lock():
        limit = csv.field_size_limit(longest)
        try:
            return list(islice(reader, 1000))
        finally:
            csv.field_size_limit(limit)


@cache
def _limit_lock() -> threading.RLock:
    lock = threading.RLock()
    hold_during_forks(lock)
    return lock


def _read_json_lines(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    for number, line in enumerate(parse_location(path).read_whole().splitlines(), 1):
        if line.strip():
            try:
                row = parse_json(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is not an object: {line[:40]!r}")
            yield row


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    with requiring("pyarrow", path, "pip install pyarrow"):
        import pyarrow.parquet
    content = parse_location(path).read_whole()
    table = pyarrow.parquet.read_table(io.BytesIO(content), columns=columns)
    for batch in table.to_batches():
        yield from batch.to_pylist()


def holds_contents(path: Path) -> bool:
    """Return whether a Parquet file has a column with the contents of files: bytes, or bytes with a path.

    Also return True if the file cannot be read, or pyarrow is not installed.
    """
    try:
        import pyarrow.parquet
        from pyarrow import types
    except ImportError:
        return True
    try:
        schema = pyarrow.parquet.read_schema(path)
    except (OSError, ValueError):
        return True
    return any(
        {"bytes", "path"} <= {inner.name for inner in field.type}
        if types.is_struct(field.type)
        else types.is_binary(field.type) or types.is_large_binary(field.type)
        for field in schema
    )


_READERS: dict[str, Callable[[Path, Sequence[str] | None], Iterator[Row]]] = {
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".parquet": _read_parquet,
}

TABLE_SUFFIXES = tuple(_READERS)
"""The suffixes of the tables that can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFile:
    """A label file.

    Attributes:
        path: The file: ``.csv``, ``.jsonl`` or ``.parquet``.
        key_column: The column with keys (``cats/0001``) or paths (``cats/0001.jpg``) below the source, or None for
            the first of two columns.
        label_column: The column with labels: class names or integers. None selects the second of two columns.
        may_mix_splits: Whether the samples may belong to several splits, according to another column.
    """

    path: Path
    key_column: str | None = None
    label_column: str | None = None
    may_mix_splits: bool = False


def find_labels(
    file: LabelFile, keys: Sequence[str], classes: Sequence[str] | None, names: Mapping[str, str] | None = None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the labels of samples, and the class names.

    Args:
        file: The file. Rows for other samples are allowed: one file may label several directories.
        keys: The keys of the samples. Each sample needs a label.
        classes: The class names that define the labels; by default, the sorted names in the file. Integers are used as
            labels directly.
        names: The keys of samples, by alternative names that the file may use.

    Returns:
        int64 [n], and the class names by label, or () if the file has integers.

    Raises:
        PackError: If the file cannot be read, a sample has no label or several, or class names and integers are mixed.
    """
    labels = _read_labels(file, names or {}, frozenset(keys))
    if missing := [key for key in keys if key not in labels]:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise PackError(
            f"{file.path} has no label for {len(missing)} of {count(len(keys), 'sample')}: "
            f"{', '.join(missing[:SHOWN])}{more}. Add rows, or remove the images. Rows name images by keys such as "
            f"{keys[0]!r}, or by paths such as {keys[0] + '.jpg'!r}"
        )
    return number_labels(file.path, list(labels.values()), [labels[key] for key in keys], classes)


def number_labels(
    path: Path, values: Sequence[int | str], wanted: Sequence[int | str], classes: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the labels of samples as integers, and the class names.

    Args:
        path: The source of the labels.
        values: All labels in the source: class names, or integers, which are used as labels directly.
        wanted: The labels of the samples.
        classes: The class names that define the labels; by default, the sorted names among ``values``.

    Returns:
        int64 [n], and the class names by label, or () if the labels are integers.

    Raises:
        PackError: If class names and integers are mixed, an integer is out of range or could be the name of a
            different class, or a name is not a class.
    """
    integers = {label for label in values if isinstance(label, int)}
    names = sorted({label for label in values if isinstance(label, str)})
    if integers and names:
        raise PackError(
            f"{path} has both class names and integers as labels, such as {names[0]!r} and {min(integers)}: use one "
            "kind"
        )
    if integers and not 0 <= min(integers) <= max(integers) < (len(classes) if classes else 2**63):
        limit = f"below {len(classes)}, the number of classes" if classes else "below 2^63"
        raise PackError(
            f"{path} has labels from {min(integers)} to {max(integers)}: they must be at least 0 and {limit}"
        )
    for label, name in enumerate(classes or ()):
        if _NUMBER.fullmatch(name) and (number := Decimal(name)) in integers and number != label:
            raise PackError(
                f"{path} has the label {number}, but the class {name!r} has the label {label}: omit --classes "
                "(classes=…) to use the numbers as labels, or use class names that are not numbers"
            )
    try:
        numbers = number_classes(names, classes or names, str(path))
    except ValueError as error:
        raise PackError(str(error)) from error
    found = (label if isinstance(label, int) else numbers[label] for label in wanted)
    return np.fromiter(found, np.int64, len(wanted)), tuple(classes or names)


def _read_labels(file: LabelFile, names: Mapping[str, str], wanted: Collection[str]) -> dict[str, str | int]:
    if file.path.suffix.lower() not in TABLE_SUFFIXES:
        raise PackError(f"{file.path} is not a label file: pass a {', '.join(TABLE_SUFFIXES)} file")
    labels, rows = dict[str, str | int](), dict[str, int]()
    key_column, label_column = file.key_column, file.label_column
    split: SplitColumn | None = None
    columns = None if key_column is None or label_column is None else [key_column, label_column]
    try:
        for number, row in enumerate(read_rows(file.path, columns), 1):
            if key_column is None or label_column is None:
                key_column, label_column = _choose_columns(file, list(row))
            for column in (key_column, label_column):
                if column not in row:
                    raise PackError(f"row {number} of {file.path} has no {column!r}: it has {', '.join(map(str, row))}")
            name = str(row[key_column])
            key = names.get(name) or without_image_suffix(name)
            try:
                label = read_label(row[label_column])
            except ValueError as error:
                raise ValueError(f"row {number} has {error}") from error
            if label is None:
                raise PackError(f"row {number} of {file.path} has no label: remove the row, or add the label")
            if labels.setdefault(key, label) != label:
                raise PackError(
                    f"{file.path} labels {key!r} as {labels[key]!r} in row {rows[key]} and as {label!r} in row "
                    f"{number}: remove one of them"
                )
            rows.setdefault(key, number)
            if key in wanted and not file.may_mix_splits:
                split = split or SplitColumn(file.path, None, (key_column, label_column))
                split.selects(row)
    except (OSError, ValueError, csv.Error) as error:
        raise PackError(f"{file.path} cannot be read as a label file: {error}") from error
    if not labels:
        raise PackError(f"{file.path} has no rows")
    if split is not None and (mixture := split.describe_mixture()) is not None:
        raise PackError(
            f"{mixture}, but their images would be packed as one dataset. To pack one split, pass the table itself as "
            "the source, with --source-split. To pack all of them, pass --source-split all (source_split='all')"
        )
    return labels


def _choose_columns(file: LabelFile, names: Sequence[str]) -> tuple[str, str]:
    if len(names) == 2 and file.key_column is None and file.label_column is None:
        return names[0], names[1]
    raise PackError(
        f"{file.path} has the columns {', '.join(map(str, names))}: specify the columns of images and labels with "
        "--key-column and --label-column (key_column, label_column)"
    )


def read_label(value: Any) -> str | int | None:
    """Return a label: an integer, a class name without surrounding spaces, or None if the label is missing.

    An integer may have any numeric type, or be text (``3``, ``3.0``). Empty text and NaN are missing labels.

    Raises:
        ValueError: If a number is not an integer, or the value has another type. The message continues "row 7 has …".
    """
    if type(value) is int or value is None:
        return value
    text = str(value).strip()
    if isinstance(value, str):
        if not _NUMBER.fullmatch(text):
            return text or None
        if len(text) < 19 and text.isdecimal():  # Nearly always.
            return int(text)
    elif isinstance(value, bool) or not isinstance(value, int | float | Decimal | np.integer | np.floating):
        raise ValueError(f"the label {value!r}, which is neither a class name nor an integer")
    number = Decimal(text)
    if number.is_nan():
        return None
    if not abs(number) < 2**63 or number != number.to_integral_value():
        raise ValueError(
            f"the label {value!r:.40}, which is not an integer below 2^63: use integers, or class names such as "
            f"{'v' + text[:40]!r}"
        )
    return int(number)
