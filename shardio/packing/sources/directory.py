"""Find the samples in a directory of images, with their fields and labels. No file is opened."""

from __future__ import annotations

import os
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from unicodedata import category

import numpy as np

from shardio.errors import PackError
from shardio.images import IMAGE_FORMATS
from shardio.packing.pack_call import Layout, PackOptions
from shardio.packing.sources.files import SHOWN, FileName, FileTable
from shardio.packing.sources.labels import find_labels
from shardio.packing.sources.layouts import (
    Pairing,
    check_pairs,
    find_images_folder,
    find_main_stems,
    is_main,
    quote,
    refuse_ambiguous_layouts,
    refuse_merged_splits,
    refuse_splits_as_classes,
    select_split,
    split_suffix,
)
from shardio.packing.sources.source import Evidence, PackSource, SourceScan
from shardio.sample import number_classes
from shardio.shards import LABEL_FIELD, MAX_MEMBER, TOO_LARGE, join_name, split_name
from shardio.storage import FolderFiles, Location, parse_location, read_as_utf8, walk_folders

_File = tuple[FileName, int, int]
"""A file of a sample: its name, size and time. (A NamedTuple takes seven times as long to make.)"""

_AS_FIELDS = (
    "If they are fields of one sample, as an image and its mask are, name their suffixes, that of the image first, "
    "such as --fields jpg,png (fields=['jpg', 'png'])"
)
"""The remedy for images with the same stem that belong together."""


def group_files(
    src: Path, folders: Sequence[FolderFiles], images: str | None, options: PackOptions
) -> tuple[FileTable, list[str], list[str]]:
    """Group the files of a source.

    Args:
        src: The source.
        folders: Its files.
        images: The name of the folder of images in the layout ``pairs``, if there is one.
        options: How to read the source.

    Returns:
        The samples that have a main field; the paths of all other files, relative to ``src``; and the keys that end in
        the file's suffix, because another image has the same stem.

    Raises:
        PackError: If some files cannot be packed. The message names up to SHOWN of them, and each remedy once.
    """
    grouping = _Grouping(src, options)
    if images is None:
        for folder in folders:
            grouping.add_folder(folder)
    else:
        grouping.add_pairs(folders, images)
    return grouping.finish(), grouping.ignored, grouping.suffixed


class _UnpackableError(Exception):
    """A sample cannot be packed. The remedy applies to all such samples."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class _Grouping:
    """Collects samples in columns.

    Attributes:
        ignored: The paths of files that do not belong to a sample.
        suffixed: The keys that end in the file's suffix, because another image has the same stem.
    """

    def __init__(self, src: Path, options: PackOptions) -> None:
        self._src, self._layout, self._rename_dots = src, options.layout, options.rename_dots
        self._has_labels = options.labels is not None
        self._fields, self._main = options.fields, options.main_fields
        self.ignored, self.suffixed = list[str](), list[str]()
        self._names = dict[str, FileName]()
        self._errors = list[_UnpackableError]()
        self._keys, self._stems = list[str](), list[str]()
        self._kind_ids = dict[tuple[FileName, ...], int]()
        self._kinds, self._counts, self._sizes, self._mtimes = array("i"), array("q"), array("q"), array("q")

    def add_folder(self, folder: FolderFiles) -> None:
        """Add the samples of one folder."""
        has_dots = self._layout == "pairs" or any(name.count(".") > 1 for name in folder.names)
        undotted = find_main_stems(folder, self._main) if has_dots else frozenset[str]()
        prefix = f"{folder.path}/" if folder.path else ""
        groups = dict[str, list[_File]]()
        for name, size, mtime_ns in _entries(folder):
            stem, suffix = split_suffix(name)
            if self._layout == "pairs" and (base := name.partition(".")[0]) in undotted:
                stem, suffix = base, name[len(base) :]
            if suffix:
                file = self._names.get(suffix) or self._make_name(suffix), size, mtime_ns
                if stem in groups:
                    groups[stem].append(file)
                else:
                    groups[stem] = [file]
            else:
                self.ignored.append(prefix + name)
        for stem, files in groups.items():
            self._add(prefix + stem, files, undotted)

    def add_pairs(self, folders: Sequence[FolderFiles], images: str) -> None:
        """Add samples whose files are in the folder of images and in parallel folders."""
        groups, pairing = defaultdict[str, list[_File]](list), Pairing(folders, images, self._main)
        for folder in folders:
            for name, size, mtime_ns in _entries(folder):
                stem, file_name = pairing.match(folder.path, name)
                if file_name.field:
                    groups[stem].append((file_name, size, mtime_ns))
                else:
                    self.ignored.append(f"{folder.path}/{name}" if folder.path else name)
        for stem, files in groups.items():
            self._add(stem, files, frozenset())

    def finish(self) -> FileTable:
        """Return the samples, sorted by key."""
        order = np.array(sorted(range(len(self._keys)), key=self._keys.__getitem__), np.int64)
        keys = [self._keys[row] for row in order.tolist()]
        self._refuse_equal(keys, order.tolist())
        if self._errors:
            more = [f"and {len(self._errors) - SHOWN} more"] if len(self._errors) > SHOWN else []
            remedies = dict.fromkeys(error.remedy for error in self._errors)
            raise PackError("\n".join([*map(str, self._errors[:SHOWN]), *more, *remedies]))
        counts = np.array(self._counts, np.int64)
        begins, first_files = np.cumsum(counts) - counts, np.concatenate([[0], np.cumsum(counts[order])])
        within = np.arange(first_files[-1]) - np.repeat(first_files[:-1], counts[order])
        files = np.repeat(begins[order], counts[order]) + within
        same = self._keys == self._stems
        return FileTable(
            root=f"{self._src}/".replace("//", "/"),
            keys=keys,
            stems=keys if same else [self._stems[row] for row in order.tolist()],
            kinds=tuple(self._kind_ids),
            kind_ids=np.array(self._kinds, np.int32)[order],
            first_files=first_files,
            sizes=np.array(self._sizes, np.int64)[files],
            mtimes_ns=np.array(self._mtimes, np.int64)[files],
            labels=None,
        )

    def _add(self, stem: str, files: list[_File], undotted: frozenset[str]) -> None:
        """Add a sample, or the error that prevents it; ignore files without a main field."""
        if not any(name.field in self._main for name, _, _ in files):
            self.ignored += (_path(stem, name) for name, _, _ in files)
            return
        if self._fields is not None:
            self.ignored += (_path(stem, name) for name, _, _ in files if name.field not in self._fields)
            files = [file for file in files if file[0].field in self._fields]
        files.sort()  # By field.
        try:
            if len(files) > 1 and self._has_several_images(stem, files):
                for file in files:
                    self._add_sample(stem, self._make_key(stem, [file], undotted, has_suffix=True), [file])
            else:
                self._add_sample(stem, self._make_key(stem, files, undotted), files)
        except _UnpackableError as error:
            self._errors.append(error)

    def _add_sample(self, stem: str, key: str, files: Sequence[_File]) -> None:
        self._keys.append(key)
        self._stems.append(stem if stem != key else key)
        kind = tuple([name for name, _, _ in files])
        self._kinds.append(self._kind_ids.setdefault(kind, len(self._kind_ids)))
        self._counts.append(len(files))
        for _, size, mtime_ns in files:
            self._sizes.append(size)
            self._mtimes.append(mtime_ns)

    def _make_name(self, suffix: str) -> FileName:
        # Files with one suffix share the object.
        return self._names.setdefault(suffix, FileName(suffix[1:].lower(), "", suffix))

    def _make_key(
        self, stem: str, files: Sequence[_File], undotted: frozenset[str], *, has_suffix: bool = False
    ) -> str:
        """Return the key of a sample. With ``has_suffix``, it ends in the suffix of its file.

        Raises:
            _UnpackableError: If the sample cannot have a key.
        """
        folder, slash, base = stem.rpartition("/")
        if "." in base:
            path = self._src / _path(stem, files[0][0])
            if self._rename_dots:
                base = base.replace(".", "_")
            elif base.partition(".")[0] in undotted:
                raise _explain_companion(path, self._layout)
            else:
                raise _UnpackableError(
                    f"{path} has a dot in its stem",
                    "A key ends at the first dot, so the rest would be read as part of the field's name: rename such "
                    "files, or pass --rename-dots (rename_dots=True)",
                )
        if has_suffix:
            base += f"_{files[0][0].suffix[1:]}"
        key = read_as_utf8(folder + slash + base)
        if has_suffix:
            self.suffixed.append(key)
        if not (key.isascii() and key.isprintable()) or key.startswith("__"):
            self._check_names(key, stem, files)
        return key

    def _check_names(self, key: str, stem: str, files: Sequence[_File]) -> None:
        is_bad = any(category(letter) in ("Cc", "Cs") for letter in key)
        for name, _, _ in files:
            if is_bad or split_name(join_name(key, name.field)) != (key, name.field):
                path = self._src / _path(stem, name)
                raise _UnpackableError(
                    f"{str(path)!r} cannot be packed, because its path contains a control character or invalid UTF-8, "
                    "or its name has no stem before the suffix",
                    "Rename such files or folders",
                )

    def _has_several_images(self, stem: str, files: Sequence[_File]) -> bool:
        """Return whether files with the same stem are separate samples, such as a.jpg and a.png in a class folder.

        Raises:
            _UnpackableError: If they may be an image and its mask, or are two files for one field.
        """
        fields = [name.field for name, _, _ in files]
        mains = [field for field in fields if field in self._main]
        if len(mains) == 1 and len({*fields}) == len(fields):
            return False
        what = " and ".join(str(self._src / _path(stem, name)) for name, _, _ in files)
        if len(mains) == 1:
            raise _UnpackableError(f"{what} have a field in common", "Keep one file for each field")
        what = f"{what} have the same stem"
        if len(files) > len(mains):
            raise _UnpackableError(
                what, f"It is not clear to which image the other files belong: rename them. {_AS_FIELDS}"
            )
        if self._layout == "pairs":
            raise _UnpackableError(what, f"Rename one of them, such as a.mask.png. {_AS_FIELDS}")
        is_in_class = self._layout == "auto" and "/" in stem and not self._has_labels
        formats = {IMAGE_FORMATS.get(field, field) for field in mains}
        if self._layout == "auto" and not is_in_class and len(formats) > 1:
            raise _UnpackableError(
                what, f"If these are separate images, pass --layout flat (layout='flat'). {_AS_FIELDS}"
            )
        return True

    def _refuse_equal(self, keys: Sequence[str], order: Sequence[int]) -> None:
        """Record an error for each two samples that have the same key, if keys may differ from the stems of files."""
        if not (self._rename_dots or self.suffixed):
            return
        for (key, row), (other, other_row) in pairwise(zip(keys, order, strict=True)):
            if key == other:
                kinds = list(self._kind_ids)
                first, second = (
                    self._src / _path(self._stems[each], kinds[self._kinds[each]][0]) for each in (other_row, row)
                )
                self._errors.append(
                    _UnpackableError(f"{first} and {second} would have the same key {key!r}", "Rename one of them")
                )


def _entries(folder: FolderFiles) -> zip[tuple[str, int, int]]:
    return zip(folder.names, folder.sizes.tolist(), folder.mtimes_ns.tolist(), strict=True)


def _path(stem: str, name: FileName) -> str:
    return f"{name.prefix}{stem}{name.suffix}"


def _explain_companion(path: Path, layout: Layout) -> _UnpackableError:
    alone = "flat" if layout == "flat" else "classes"
    return _UnpackableError(
        f"{path} has a dot in its stem, and the part before the dot is the name of an image in the same folder",
        "To make such files fields of one sample, pass --layout pairs (layout='pairs'). To make them separate samples, "
        f"pass --layout {alone} --rename-dots",
    )


def find_main_file(src: Path, options: PackOptions) -> Path | None:
    """Return a file that makes a directory a source of files; None if there is none, or ``src`` is not a directory.

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


class Directory(PackSource):
    """A directory of images, or of other files."""

    what = "files"
    takes = ("layout", "source_split", "fields")

    def find(self, src: Path) -> Evidence | None:
        file = find_main_file(src, PackOptions())
        return None if file is None else Evidence(file)

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        return scan_directory(src, parse_location("OUT"), options)


def scan_directory(src: Path, dst: Location, options: PackOptions) -> SourceScan:
    """Find the samples in ``src/class/…/name.jpg``, or in a flat directory ``src/name.jpg``.

    Args:
        src: The directory.
        dst: The destination, which error messages name.
        options: The options for reading it. The layout ``auto`` accepts class folders or a flat directory, and refuses
            a directory that looks different. Without class names, the sorted names of the class folders, or those in
            the file of labels, define the labels.

    Raises:
        PackError: If the directory cannot be packed. The message names the file that prevents it.
    """
    if not src.is_dir():
        raise PackError(f"the source {src} {'is not a directory' if src.exists() else 'does not exist'}")
    layout, rename_dots, classes, labels = options.layout, options.rename_dots, options.classes, options.label_file
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
    src: Path, dst: Location, folders: Sequence[FolderFiles], options: PackOptions, *, has_classes: bool
) -> None:
    """Raise PackError if splits would silently become one dataset, or the chosen split would become a class."""
    if has_classes and options.layout == "pairs":
        refuse_splits_as_classes(src, dst, folders, options.main_fields, pairs=True)
    name, file = options.source_split, options.label_file
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
    """Return the keys that differ from the stems of their files, by path, and by stem if no other key has that stem."""
    if table.stems is table.keys:
        return {}
    found, suffixed = dict[str, str](), set(suffixed)
    for key, stem, kind_id in zip(table.keys, table.stems, table.kind_ids.tolist(), strict=True):
        if key != stem:
            found |= {f"{name.prefix}{stem}{name.suffix}": key for name in table.kinds[kind_id]}
            if key not in suffixed:
                found[stem] = key
    return found


def _find_class_folders(src: Path, table: FileTable, options: PackOptions) -> tuple[str, ...]:
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
