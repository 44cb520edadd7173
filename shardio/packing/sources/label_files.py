"""Labels from a file: CSV, JSON Lines or Parquet, with a column that names images and one that labels them."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.classes import number_classes
from shardio.errors import PackError
from shardio.packing.sources.files import SHOWN
from shardio.packing.sources.keys import without_image_suffix
from shardio.packing.sources.splits import SplitColumn
from shardio.packing.sources.table_rows import TABLE_SUFFIXES, read_rows

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*|\.[0-9]+[eE][+-]?[0-9]+)?")
"""Numbers as programs write them to text: pandas an integer as ``3.0``, numpy as ``3.000000000000000000e+00``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelFile:
    """A file of labels.

    Attributes:
        path: The file: ``.csv``, ``.jsonl`` or ``.parquet``.
        key_column: The column with keys (``cats/0001``) or paths (``cats/0001.jpg``) below the source. None if the file
            has two columns: it is the first one.
        label_column: The column with labels: class names, or integers. None if the file has two columns: it is the
            second one.
        may_mix_splits: Whether the samples may be of several splits, according to a further column.
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
        keys: The keys of the samples. Each needs a label.
        classes: The class names that define the labels; by default, the sorted names in the file. Integers are labels
            by themselves.
        names: The keys by other names of samples, which the file may have instead.

    Returns:
        int64 [n], and the class names by label; none if the file has integers.

    Raises:
        PackError: If the file cannot be read, a sample has no label or two, or class names and integers are mixed.
    """
    labels = _read_labels(file, names or {}, frozenset(keys))
    if missing := [key for key in keys if key not in labels]:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise PackError(
            f"{file.path} has no label for {len(missing)} of {len(keys)} samples: {', '.join(missing[:SHOWN])}{more}. "
            f"Add rows, or remove the images. Images are named by keys such as {keys[0]!r}, or by paths such as "
            f"{keys[0] + '.jpg'!r}"
        )
    return number_labels(file.path, list(labels.values()), [labels[key] for key in keys], classes)


def number_labels(
    path: Path, values: Sequence[int | str], wanted: Sequence[int | str], classes: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the labels of samples as integers, and the class names.

    Args:
        path: Where the labels are from.
        values: All labels there: class names, or integers, which are labels by themselves.
        wanted: The labels of the samples.
        classes: The class names that define the labels; by default, the sorted names among ``values``.

    Returns:
        int64 [n], and the class names by label; none if the labels are integers.

    Raises:
        PackError: If class names and integers are mixed, an integer is out of range or may be the name of another
            class, or a name is not a class.
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
                "(classes=…) to take the numbers as labels, or use class names that are not numbers"
            )
    try:
        numbers = number_classes(names, classes or names, str(path))
    except ValueError as error:
        raise PackError(str(error)) from error
    found = (label if isinstance(label, int) else numbers[label] for label in wanted)
    return np.fromiter(found, np.int64, len(wanted)), tuple(classes or names)


def _read_labels(file: LabelFile, names: Mapping[str, str], wanted: Collection[str]) -> dict[str, str | int]:
    """Return the label of each key in a file: a class name or an integer. Those of wanted keys are of one split."""
    if file.path.suffix.lower() not in TABLE_SUFFIXES:
        raise PackError(f"{file.path} is not a file of labels: pass a {', '.join(TABLE_SUFFIXES)} file")
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
        raise PackError(f"{file.path} cannot be read as a file of labels: {error}") from error
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
        f"{file.path} has the columns {', '.join(map(str, names))}: name the one with the images and the one with the "
        "labels by --key-column and --label-column (key_column, label_column)"
    )


def read_label(value: Any) -> str | int | None:
    """Return a label: an integer, a class name without spaces around it, or None if it is missing.

    Numbers are integers in all their forms, as text (``3``, ``3.0``) and as any type. Empty text and NaN are missing.

    Raises:
        ValueError: If it is another number, or of another type. The message continues "row 7 has …".
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
