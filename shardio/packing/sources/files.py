"""Group the files of a directory into samples, and keep them in a table."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unicodedata import category

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import IMAGE_FORMATS
from shardio.packing.pack_call import Layout, PackOptions
from shardio.packing.sources.source import FileProblem, SourceFile, find_change, list_some, read_unchanged
from shardio.sample import Sample
from shardio.shards import BLOCK, LABEL_FIELD, fits_plain_header, join_name, make_header, split_name
from shardio.storage import FolderFiles, read_as_utf8

PART = 4096
"""The number of samples whose names are hashed together."""

JSON_FIELD = "json"
"""The field for the columns of a table that are not paths, labels or keys."""

_AS_FIELDS = (
    "If they are fields of one sample, such as an image and its mask, list their suffixes, starting with the image's: "
    "--fields jpg,png (fields=['jpg', 'png'])"
)
"""The remedy for images with the same stem that belong together."""


class FileName(NamedTuple):
    """The field of a file, and the prefix and the suffix that turn the sample's stem into the file's path."""

    field: str
    prefix: str
    suffix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSample:
    """A sample before packing: its key, its files, its label, and the content of its ``json`` field."""

    key: str
    files: Mapping[str, SourceFile]
    label: int | None
    json: bytes | None

    def read(self) -> Sample:
        fields = {name: read_unchanged(file) for name, file in self.files.items()}
        if self.label is not None:
            fields[LABEL_FIELD] = b"%d" % self.label
        if self.json is not None:
            fields[JSON_FIELD] = self.json
        return Sample(key=self.key, fields=dict(sorted(fields.items())), origin=self.key)

    def problem(self, field: str, what: str) -> FileProblem:
        return FileProblem(Path(self.files[field].path), what)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTable:
    """The samples of a directory, or of a table of paths: see :class:`~shardio.packing.sources.source.SourceTable`.

    Attributes:
        root: The directory of the source, as a string that ends in a slash.
        home: The prefix of all files' paths: ``root`` or an empty string.
        keys: The keys of the samples.
        stems: The paths of the samples' files without ``home``, prefix and suffix. Stems usually equal the keys.
        kinds: For each kind of sample, the names of its files, sorted by field.
        kind_ids: int32 [n], the kind of each sample.
        first_files: int64 [n + 1], the place of each sample's first file in ``sizes`` and ``mtimes_ns``.
        sizes: int64 [m], the sizes of all files in bytes.
        mtimes_ns: int64 [m], their modification times in nanoseconds.
        labels: int64 [n], the label of each sample, or None if the samples have none.
        json: The concatenated contents of the ``json`` fields that are not files, or None if the samples have none.
        json_bounds: int64 [n + 1], the offsets in ``json`` at which the contents start and stop.
    """

    root: str
    home: str
    keys: Sequence[str]
    stems: Sequence[str]
    kinds: Sequence[Sequence[FileName]]
    kind_ids: NDArray[np.int32]
    first_files: NDArray[np.int64]
    sizes: NDArray[np.int64]
    mtimes_ns: NDArray[np.int64]
    labels: NDArray[np.int64] | None = None
    json: bytes | None = None
    json_bounds: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum()) + len(self.json or b"")

    def select(self, rows: NDArray[np.int64]) -> FileTable:
        """Return the given rows, int64 [k], of a table without labels."""
        counts = np.diff(self.first_files)[rows]
        first_files = np.concatenate([[0], np.cumsum(counts)])
        files = np.arange(first_files[-1]) + np.repeat(self.first_files[rows] - first_files[:-1], counts)
        keys = [self.keys[row] for row in rows.tolist()]
        return replace(
            self,
            keys=keys,
            stems=keys if self.stems is self.keys else [self.stems[row] for row in rows.tolist()],
            kind_ids=self.kind_ids[rows],
            first_files=first_files,
            sizes=self.sizes[files],
            mtimes_ns=self.mtimes_ns[files],
        )

    def find_changes(self) -> Iterator[FileProblem]:
        for row in range(len(self)):
            yield from filter(None, map(find_change, self.sample(row).files.values()))

    def sample(self, row: int) -> FileSample:
        """Return one sample."""
        (sample,) = self.take(np.array([row]))
        return sample

    def take(self, rows: NDArray[np.int64]) -> list[FileSample]:
        samples = list[FileSample]()
        labels = [None] * len(rows) if self.labels is None else self.labels[rows].tolist()
        for row, first, kind_id, label in zip(
            rows.tolist(), self.first_files[rows].tolist(), self.kind_ids[rows].tolist(), labels, strict=True
        ):
            stem, kind = self.stems[row], self.kinds[kind_id]
            sizes, mtimes_ns = (column[first : first + len(kind)].tolist() for column in (self.sizes, self.mtimes_ns))
            files = {
                name.field: SourceFile(f"{self.home}{name.prefix}{stem}{name.suffix}", size, mtime_ns)
                for name, size, mtime_ns in zip(kind, sizes, mtimes_ns, strict=True)
            }
            json: bytes | None = None
            if self.json is not None and self.json_bounds is not None:
                json = self.json[self.json_bounds[row] : self.json_bounds[row + 1]]
            samples.append(FileSample(key=self.keys[row], files=files, label=label, json=json))
        return samples

    def sizes_in_tar(self) -> NDArray[np.int64]:
        total = np.zeros(len(self), np.int64)
        padded = -(-self.sizes // BLOCK) * BLOCK
        for kind_id, kind in enumerate(self.kinds):
            rows = np.flatnonzero(self.kind_ids == kind_id)
            keys = [self.keys[row] for row in rows.tolist()]
            for i, name in enumerate(kind):
                files = self.first_files[rows] + i
                total[rows] += padded[files] + header_sizes(keys, name.field, self.sizes[files])
            if self.labels is not None:
                total[rows] += BLOCK + header_sizes(keys, LABEL_FIELD, np.ones(len(rows), np.int64))
        if self.json_bounds is not None:
            sizes = np.diff(self.json_bounds)
            total += -(-sizes // BLOCK) * BLOCK + header_sizes(self.keys, JSON_FIELD, sizes)
        return total

    def digest(self) -> bytes:
        digest = xxhash.xxh3_128(repr(self.kinds).encode(errors="surrogateescape"))
        for first in range(0, len(self), PART):
            names = "\n".join((*self.keys[first : first + PART], *self.stems[first : first + PART], ""))
            digest.update(names.encode(errors="surrogateescape"))
        for column in self.kind_ids, self.sizes, self.mtimes_ns, self.labels:
            digest.update(b"none" if column is None else np.ascontiguousarray(column).data)
        if self.json is not None and self.json_bounds is not None:
            digest.update(self.json_bounds.data)
            digest.update(self.json)
        return digest.digest()


def header_sizes(keys: Sequence[str], field: str, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sizes of the headers of one field's members, in bytes, int64 [n]."""
    headers = np.full(len(keys), BLOCK, np.int64)
    for i, (key, size) in enumerate(zip(keys, sizes.tolist(), strict=True)):
        if not fits_plain_header(name := join_name(key, field), size):
            headers[i] = len(make_header(name, size))
    return headers


class Pairing:
    """Matches each file to the sample of its image.

    A file's name may contain the name of its top folder, followed by other words, as in Cityscapes:
    ``leftImg8bit/x_leftImg8bit.png`` and ``gtFine/x_gtFine_labelIds.png`` belong to ``x``. Companions may be in
    subfolders of their top folder, as in Oxford Pets: ``annotations/trimaps/x.png``.

    Attributes:
        stems: The stems of the samples, relative to the image folder.

    Args:
        folders: All files, by folder.
        images: The name of the image folder.
        main: The suffixes of images.
    """

    def __init__(self, folders: Sequence[FolderFiles], images: str, main: Collection[str]) -> None:
        self._images = images
        found = [
            (_inner(folder.path), stem)
            for folder in folders
            if folder.path.partition("/")[0] == images
            for stem, suffix in map(split_suffix, folder.names)
            if suffix[1:].lower() in main
        ]
        self._cuts_images = all(_cut(stem, images)[1] for _, stem in found)
        self.stems = frozenset(inner + (_cut(stem, images)[0] if self._cuts_images else stem) for inner, stem in found)

    def match(self, folder: str, name: str) -> tuple[str, FileName]:
        """Return the stem of a file's sample, and the file's name in that sample.

        The field is empty if the file has no suffix. If the sample has no image, its stem is not among ``stems``.
        """
        (stem, suffix), top, inner = split_suffix(name), folder.partition("/")[0], _inner(folder)
        field = suffix[1:].lower()
        if top == self._images and self._cuts_images:
            base, tail = _cut(stem, top)
            return inner + base, FileName(field, f"{top}/", tail + suffix)
        if not (top and field) or top == self._images:
            return inner + stem, FileName(field, f"{top}/" if top else "", suffix)
        if inner + stem in self.stems:  # Nearly always.
            return inner + stem, FileName(f"{top.lower()}.{field}", f"{top}/", suffix)
        parts = folder.split("/")
        for base, tail in dict.fromkeys(((stem, ""), _cut(stem, top))):
            for depth in range(1, len(parts) + 1):
                sample = "".join(f"{part}/" for part in parts[depth:]) + base
                if sample in self.stems:
                    prefix = parts[:depth]
                    more = tail[len(_word(tail, top)) :].strip("_-").lower()
                    kind = ".".join(prefix).lower() + (f"_{more}" if more else "")
                    return sample, FileName(f"{kind}.{field}", "/".join(prefix) + "/", tail + suffix)
        return inner + stem, FileName(f"{top.lower()}.{field}", f"{top}/", suffix)


def split_suffix(name: str) -> tuple[str, str]:
    """Split a file's name before its last dot. As in pathlib, the suffix is empty if the name ends with a dot."""
    stem, dot, suffix = name.rpartition(".")
    return (stem, dot + suffix) if stem and suffix else (name, "")


def _inner(folder: str) -> str:
    """Return a folder's path inside its top folder, with a trailing slash unless the path is empty."""
    inner = folder.partition("/")[2]
    return f"{inner}/" if inner else ""


def _cut(stem: str, top: str) -> tuple[str, str]:
    """Split a stem before the name of the top folder. The second part is empty if that name is not in the stem."""
    found = _pattern(top).search(stem)
    return (stem[: found.start()], stem[found.start() :]) if found is not None and found.start() else (stem, "")


def _word(tail: str, top: str) -> str:
    found = _pattern(top).match(tail)
    return found[0] if found is not None else ""


@lru_cache(64)
def _pattern(top: str) -> re.Pattern[str]:
    """Return a pattern that finds a folder's name or its singular in file names, such as masks/a_mask.png."""
    words = "|".join(re.escape(word) for word in dict.fromkeys((top, top.removesuffix("s"))) if word)
    return re.compile(rf"[_-]({words})(?=[_-]|$)", re.IGNORECASE)


def is_main(name: str, main: Collection[str]) -> bool:
    """Return whether a file's suffix names a main field, so that the file defines a sample."""
    return split_suffix(name)[1][1:].lower() in main


def find_main_stems(folder: FolderFiles, main: Collection[str]) -> frozenset[str]:
    """Return the stems of a folder's main files, except stems with a dot: a.mask.png can belong to a.jpg."""
    stems = (split_suffix(name)[0] for name in folder.names if is_main(name, main))
    return frozenset(stem for stem in stems if "." not in stem)


_File = tuple[FileName, int, int]
"""A file of a sample: its name, size and modification time. Creating a NamedTuple would take seven times as long."""


def group_files(
    src: Path, folders: Sequence[FolderFiles], images: str | None, options: PackOptions
) -> tuple[FileTable, list[str], list[str]]:
    """Group the files of a source into samples. ``images`` is the image folder of the layout ``pairs``, if any.

    Returns:
        The samples that have a main field; the paths of all other files, relative to ``src``; and the keys that end in
        their file's suffix, because another image has the same stem.

    Raises:
        PackError: If some files cannot be packed. The message names up to SHOWN files, and each remedy once.
    """
    grouping = _Grouping(src, options)
    if images is None:
        for folder in folders:
            grouping.add_folder(folder)
    else:
        grouping.add_pairs(folders, images)
    return grouping.finish(), grouping.ignored, grouping.suffixed


class _UnpackableError(Exception):
    """A sample cannot be packed. The remedy applies to all samples with the same problem."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


class _Grouping:
    """Collects samples in columns."""

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
        order = np.array(sorted(range(len(self._keys)), key=self._keys.__getitem__), np.int64)
        keys = [self._keys[row] for row in order.tolist()]
        self._refuse_equal(keys, order.tolist())
        if self._errors:
            remedies = dict.fromkeys(error.remedy for error in self._errors)
            raise PackError("\n".join([*list_some(list(map(str, self._errors))), *remedies]))
        counts = np.array(self._counts, np.int64)
        begins, first_files = np.cumsum(counts) - counts, np.concatenate([[0], np.cumsum(counts[order])])
        within = np.arange(first_files[-1]) - np.repeat(first_files[:-1], counts[order])
        files = np.repeat(begins[order], counts[order]) + within
        same = self._keys == self._stems
        root = f"{self._src}/".replace("//", "/")
        return FileTable(
            root=root,
            home=root,
            keys=keys,
            stems=keys if same else [self._stems[row] for row in order.tolist()],
            kinds=tuple(self._kind_ids),
            kind_ids=np.array(self._kinds, np.int32)[order],
            first_files=first_files,
            sizes=np.array(self._sizes, np.int64)[files],
            mtimes_ns=np.array(self._mtimes, np.int64)[files],
        )

    def _add(self, stem: str, files: list[_File], undotted: frozenset[str]) -> None:
        """Add a sample, or the error that prevents packing it. Ignore files without a main field."""
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
        # All files with the same suffix share one FileName.
        return self._names.setdefault(suffix, FileName(suffix[1:].lower(), "", suffix))

    def _make_key(
        self, stem: str, files: Sequence[_File], undotted: frozenset[str], *, has_suffix: bool = False
    ) -> str:
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
        """Return whether files with the same stem are separate samples, such as a.jpg and a.png in a class folder."""
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
                what, f"It is not clear which image the other files belong to: rename them. {_AS_FIELDS}"
            )
        if self._layout == "pairs":
            raise _UnpackableError(what, f"Rename one of them, for example to a.mask.png. {_AS_FIELDS}")
        is_in_class = self._layout == "auto" and "/" in stem and not self._has_labels
        formats = {IMAGE_FORMATS.get(field, field) for field in mains}
        if self._layout == "auto" and not is_in_class and len(formats) > 1:
            raise _UnpackableError(
                what, f"If these are separate images, pass --layout flat (layout='flat'). {_AS_FIELDS}"
            )
        return True

    def _refuse_equal(self, keys: Sequence[str], order: Sequence[int]) -> None:
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
