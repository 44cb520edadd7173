"""Group files into samples: files with the same stem are fields of one sample."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unicodedata import category

import numpy as np

from shardio.errors import PackError
from shardio.images import IMAGE_FORMATS
from shardio.packing.sources.file_table import FileName, FileTable
from shardio.packing.sources.files import SHOWN
from shardio.packing.sources.layouts import Layout, find_main_stems
from shardio.packing.sources.pairing import Pairing, split_suffix
from shardio.packing.sources.source import SourceOptions
from shardio.shards import join_name, split_name
from shardio.storage import FolderFiles, read_as_utf8

_File = tuple[FileName, int, int]
"""A file of a sample: its name, size and time. (A NamedTuple takes seven times as long to make.)"""

_AS_FIELDS = (
    "If they are fields of one sample, as an image and its mask are, name their suffixes, that of the image first, "
    "such as --fields jpg,png (fields=['jpg', 'png'])"
)
"""The remedy for images with the same stem that belong together."""


def group_files(
    src: Path, folders: Sequence[FolderFiles], images: str | None, options: SourceOptions
) -> tuple[FileTable, list[str], list[str]]:
    """Group the files of a source.

    Args:
        src: The source.
        folders: Its files.
        images: The name of the folder of images in the layout ``pairs``, if there is one.
        options: How to read the source.

    Returns:
        The samples that have a main field; the paths of all files that do not belong to one, relative to ``src``; and
        the keys that end in the suffix of the file, because another image has the same stem.

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
    """A sample that cannot be packed: why, and what to do about all such samples."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class _Grouping:
    """Collects samples in columns.

    Attributes:
        ignored: The paths of files that do not belong to a sample.
        suffixed: The keys that end in the suffix of the file, because another image has the same stem.
    """

    def __init__(self, src: Path, options: SourceOptions) -> None:
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
        """Return the name of files with a suffix, the same object each time."""
        return self._names.setdefault(suffix, FileName(suffix[1:].lower(), "", suffix))

    def _make_key(
        self, stem: str, files: Sequence[_File], undotted: frozenset[str], *, has_suffix: bool = False
    ) -> str:
        """Return the key of a sample, with the suffix of its file if it is to have it.

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
        """Return whether files with one stem are separate samples, as a.jpg and a.png in a class folder are.

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
        """Note an error for each two samples that have the same key, which is not the stem of their files."""
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
