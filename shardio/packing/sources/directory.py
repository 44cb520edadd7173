"""Find the samples in a directory of images, with their fields and labels. No file is opened."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from shardio.classes import number_classes
from shardio.errors import PackError
from shardio.packing.sources.file_table import FileTable
from shardio.packing.sources.grouping import group_files
from shardio.packing.sources.label_files import find_labels
from shardio.packing.sources.layouts import (
    check_pairs,
    find_images_folder,
    is_main,
    quote,
    refuse_ambiguous_layouts,
    refuse_merged_splits,
    refuse_splits_as_classes,
    select_split,
)
from shardio.packing.sources.pairing import split_suffix
from shardio.packing.sources.source import SourceOptions, SourceScan
from shardio.shards import LABEL_FIELD, MAX_MEMBER, TOO_LARGE
from shardio.storage import FolderFiles, Location, read_as_utf8, walk_folders


def find_main_file(src: Path, options: SourceOptions) -> Path | None:
    """Return a file that makes a directory a source of files; None if there is none, or it is no directory.

    Raises:
        PackError: If a folder cannot be read.
    """
    if not src.is_dir():
        return None
    with _reading(src):
        for folder in walk_folders(src):
            if (name := next((name for name in folder.names if is_main(name, options.main_fields)), None)) is not None:
                return src / folder.path / name
    return None


def scan_directory(src: Path, dst: Location, options: SourceOptions) -> SourceScan:
    """Find the samples in ``src/class/…/name.jpg``, or in a flat directory ``src/name.jpg``.

    Args:
        src: The directory.
        dst: The destination, which error messages name.
        options: How to read it. The layout ``auto`` accepts class folders or a flat directory, and refuses a directory
            that looks different. Without class names, the sorted names of the class folders define the labels, or those
            in the file of labels.

    Raises:
        PackError: If the directory cannot be packed. The message names the file that prevents it.
    """
    if not src.is_dir():
        raise PackError(f"the source {src} {'is not a directory' if src.exists() else 'does not exist'}")
    layout, rename_dots, classes, labels = options.layout, options.rename_dots, options.classes, options.labels
    with _reading(src):
        main = options.main_fields
        folders = select_split(src, list(walk_folders(src)), main, options.source_split)
        _refuse_lost_folders(src, folders)
        if layout == "auto" and labels is None:
            refuse_ambiguous_layouts(src, dst, folders, main, rename_dots=rename_dots)
        images = find_images_folder(folders) if layout == "pairs" else None
        has_classes = layout != "flat" and images is None and labels is None
        _refuse_splits(src, dst, folders, options, has_classes=has_classes)
        table, ignored, suffixed = group_files(src, folders, images, options)
        if layout == "pairs":
            table = check_pairs(src, images, table, ignored, main, options.on_incomplete)
        found = _find_class_folders(src, table, options) if has_classes else ()
        _check_sizes(table)
    if not len(table):
        raise PackError(f"{src} holds no {options.description}")
    if labels is None:
        samples, classes = _with_labels(table, found, classes, src), found if classes is None else classes
    else:
        _refuse_label_fields(table, f"{labels.path} already defines one")
        numbers, classes = find_labels(labels, table.keys, classes, _find_names(table, suffixed))
        samples = table.with_labels(numbers)
    return SourceScan(
        samples=samples, classes=tuple(classes), ignored=[src / path for path in ignored], suffixed=suffixed
    )


@contextmanager
def _reading(src: Path) -> Iterator[None]:
    """Raise PackError if the block cannot read a file or a folder."""
    try:
        yield
    except OSError as error:
        raise PackError(f"{error.filename or src} cannot be read: {error.strerror or error}") from error


def _refuse_lost_folders(src: Path, folders: Sequence[FolderFiles]) -> None:
    """Raise PackError for a broken link that may lead to a folder of samples."""
    for folder in folders:
        for number in np.flatnonzero(folder.sizes < 0).tolist():
            if not split_suffix(name := folder.names[number])[1]:
                raise PackError(
                    f"{src / folder.path / name} is a symbolic link that leads nowhere. If it is a folder of "
                    "samples, they would be left out: correct or remove the link"
                )


def _refuse_splits(
    src: Path, dst: Location, folders: Sequence[FolderFiles], options: SourceOptions, *, has_classes: bool
) -> None:
    """Raise PackError if splits would become one dataset without a word, or the chosen one a class."""
    if has_classes and options.layout == "pairs":
        refuse_splits_as_classes(src, dst, folders, options.main_fields, pairs=True)
    name, file = options.source_split, options.labels
    if name is None:
        given: dict[str, str | None] = {"--layout": options.layout if options.layout != "auto" else None}
        if file is not None:
            given |= {
                "--labels": str(file.path),
                "--key-column": file.key_column,
                "--label-column": file.label_column,
            }
        text = " ".join(f"{option} {quote(value)}" for option, value in given.items() if value is not None)
        refuse_merged_splits(src, dst, folders, options.main_fields, text, has_classes=has_classes)
    elif has_classes and all(folder.path.partition("/")[0] == name for folder in folders):
        raise PackError(
            f"the split {name!r} of {src} would be a class, because its folder is where those of classes are. Pack "
            f"this folder:\n  shardio pack {quote(src / name)} {quote(dst)}"
        )


def _with_labels(table: FileTable, found: Sequence[str], classes: Sequence[str] | None, src: Path) -> FileTable:
    """Return the samples with the label of each one's class folder."""
    if classes is not None and not found:
        raise PackError(f"classes are given, but {src} is packed without class folders: omit --classes (classes=…)")
    try:
        labels = number_classes(found, found if classes is None else classes, str(src))
    except ValueError as error:
        raise PackError(str(error)) from error
    if not found:
        return table
    numbers = (labels[key.split("/", 1)[0]] for key in table.keys)
    return table.with_labels(np.fromiter(numbers, np.int64, len(table)))


def _find_names(table: FileTable, suffixed: Collection[str]) -> dict[str, str]:
    """Return the keys that are not the stems of their files, by path, and by stem if no other key has the same."""
    if table.stems is table.keys:
        return {}
    found, suffixed = dict[str, str](), set(suffixed)
    for key, stem, kind_id in zip(table.keys, table.stems, table.kind_ids.tolist(), strict=True):
        if key != stem:
            found |= {f"{name.prefix}{stem}{name.suffix}": key for name in table.kinds[kind_id]}
            if key not in suffixed:
                found[stem] = key
    return found


def _find_class_folders(src: Path, table: FileTable, options: SourceOptions) -> tuple[str, ...]:
    """Return the sorted names of the class folders; none for a flat directory."""
    flat = next((row for row, key in enumerate(table.keys) if "/" not in key), None)
    used = {key.split("/", 1)[0] for key in table.keys if "/" in key}
    if flat is not None and used:
        path = next(iter(table.sample(flat).files.values())).path
        raise PackError(f"{src} holds both class folders and images such as {path}: move the images into class folders")
    if not used:
        return ()
    for folder in sorted(src.iterdir()):
        if folder.is_dir() and not folder.name.startswith(".") and read_as_utf8(folder.name) not in used:
            raise PackError(f"the class folder {folder} holds no {options.description}: add files or remove the folder")
    _refuse_label_fields(table, "its class folder already defines one")
    return tuple(sorted(used))


def _refuse_label_fields(table: FileTable, why: str) -> None:
    """Raise PackError if a sample has a file that is its label."""
    labelled = next((row for row, kind in enumerate(table.kinds) if LABEL_FIELD in {name.field for name in kind}), None)
    if labelled is not None:
        row = int(np.flatnonzero(table.kind_ids == labelled)[0])
        raise PackError(f"{table.sample(row).files[LABEL_FIELD].path} is a label, but {why}: remove the file")


def _check_sizes(table: FileTable) -> None:
    """Raise PackError for a file that is too large, and OSError for a broken link."""
    for file_index in np.flatnonzero((table.sizes > MAX_MEMBER) | (table.sizes < 0))[:1].tolist():
        row = int(np.searchsorted(table.first_files, file_index, side="right")) - 1
        for file in table.sample(row).files.values():
            if file.size < 0:
                os.stat(file.path)  # noqa: PTH116  # It raises the error.
            elif file.size > MAX_MEMBER:
                raise PackError(f"{file.path} has {file.size} bytes, {TOO_LARGE}")
