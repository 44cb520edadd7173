"""The columns of a table: which one holds the images, the labels and the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import PackError
from shardio.images import find_field, find_format
from shardio.packing.sources.records import IMAGE
from shardio.packing.sources.source import SourceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What the columns of a table become.

    Attributes:
        contents: The columns whose values are contents of files.
        image: The one whose field has the name of its format alone, such as ``jpg``. The fields of the others have
            names such as ``depth.png``.
        label: The column with labels.
        key: The column with keys.
        others: The columns that become the ``json`` field.
    """

    contents: tuple[str, ...] = ()
    image: str | None = None
    label: str | None = None
    key: str | None = None
    others: tuple[str, ...] = ()


def choose_columns(
    path: Path, names: Sequence[str], *, contents: Sequence[str], labels: Sequence[str], options: SourceOptions
) -> Columns:
    """Return what each column becomes.

    Args:
        path: The table, for messages.
        names: The names of all columns.
        contents: Those whose values are contents of files.
        labels: Those that are labels by their type.
        options: The columns that the caller has chosen. Without a choice, the images are in the only column of contents
            or in ``image``, the labels in the only column of labels or in ``label``, and samples are numbered.

    Raises:
        PackError: If there is no such column, or the choice is not clear.
    """
    for option in ("image_column", "label_column", "key_column"):
        name = getattr(options, option)
        if name is not None and name not in names:
            raise PackError(
                f"{path} has no column {name!r}, which --{option.replace('_', '-')} ({option}) names: it has "
                f"{', '.join(names)}"
            )
    image = options.image_column or _choose(path, contents, "image", "image_column", "images")
    label = options.label_column
    if label is None and options.labels is None:
        by_name = [name for name in ("label",) if name in names and name not in contents]
        label = _choose(path, labels or by_name, "label", "label_column", "labels")
    key = options.key_column
    lower = [name.lower() for name in names]
    if len({*lower}) != len(lower):
        twice = sorted(name for name in names if lower.count(name.lower()) > 1)
        raise PackError(
            f"columns of {path} differ only in case ({', '.join(twice)}), but fields are lower case: rename one"
        )
    if image is not None and image not in contents:
        raise PackError(f"the column {image!r} of {path} does not hold bytes: choose one of {', '.join(contents)}")
    others = tuple(name for name in names if name not in contents and name not in (label, key))
    return Columns(contents=tuple(contents), image=image, label=label, key=key, others=others)


def name_field(columns: Columns, name: str, content: bytes, suffix: str) -> str:
    """Return the name of the field for a content; ``IMAGE`` if it is the sample's image.

    Args:
        columns: The columns of the table.
        name: The content's column. It may be followed by a dot and the number of the content.
        content: The content.
        suffix: The suffix of its file, "" if that is unknown.
    """
    if name == columns.image:
        return IMAGE if find_format(content) is not None or not suffix else suffix
    if not suffix:
        suffix = "bin" if content and find_format(content) is None else find_field(content)
    return f"{name.lower()}.{suffix}"


def _choose(path: Path, candidates: Sequence[str], usual: str, option: str, what: str) -> str | None:
    if usual in candidates:
        return usual
    if len(candidates) > 1:
        raise PackError(
            f"several columns of {path} may hold the {what} ({', '.join(candidates)}): choose one by "
            f"--{option.replace('_', '-')} ({option})"
        )
    return candidates[0] if candidates else None
