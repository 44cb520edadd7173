"""Pack LMDB environments whose entries are files: named images with fields, or pairs for text recognition."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.images import IMAGE_FIELDS, find_format
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import check_key, check_name
from shardio.packing.sources.records import IMAGE, RecordScan, scan_records
from shardio.packing.sources.source import (
    Evidence,
    FileChangedError,
    PackSource,
    SourceFile,
    SourceScan,
    check_unchanged,
    list_some,
    requiring,
    stat_file,
)
from shardio.storage import parse_location
from shardio.values import count

_NUMBERED = {b"image": IMAGE, b"label": "txt"}
"""The fields of numbered entries, by the part of the name before the number."""

_MAGIC = b"\xde\xc0\xef\xbe"
"""LMDB's magic number, at byte 16 of its file."""

_PROBED = 100
"""The maximum number of entries without a suffix whose values are examined before packing starts."""

_PICKLE = re.compile(rb"\x80[\x02-\x05].*\.", re.DOTALL)
"""Matches a pickle of protocol 2 or later. No image has this signature."""

_USE_ITERABLE = (
    "Read the samples with the program that knows their format, and pack the samples that it yields: "
    "shardio.pack(iterable, out), or shardio.ShardWriter"
)


class _Entry(NamedTuple):
    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entries:
    """The entries of n samples, in columns.

    Attributes:
        keys: The keys of the samples.
        sizes: int64 [n], the size of each sample's values in bytes.
        names: The concatenated names of all entries.
        bounds: int64 [m + 1], the offsets in ``names`` at which the names start and stop.
        first_entries: int64 [n + 1], the place of each sample's first entry.
        fields: The names of all fields.
        field_indices: int32 [m], the field of each entry.
        ignored: The names of entries that do not belong to a sample.
    """

    keys: Sequence[str]
    sizes: NDArray[np.int64]
    names: bytes
    bounds: NDArray[np.int64]
    first_entries: NDArray[np.int64]
    fields: Sequence[str]
    field_indices: NDArray[np.int32]
    ignored: Sequence[str]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def num_entries(self) -> int:
        return len(self.field_indices)

    def take(self, row: int) -> list[tuple[bytes, str]]:
        first, stop = self.first_entries[row : row + 2].tolist()
        bounds = self.bounds[first : stop + 1].tolist()
        return [
            (self.names[bounds[i] : bounds[i + 1]], self.fields[field_index])
            for i, field_index in enumerate(self.field_indices[first:stop].tolist())
        ]


class _EntryNames:
    """A collector of a database's entries, which must be added in the order of their names."""

    def __init__(
        self, path: Path, *, rename_dots: bool, main_fields: Collection[str], fields: Sequence[str] | None
    ) -> None:
        self._path, self._rename_dots = path, rename_dots
        self._main, self._wanted = {IMAGE, *main_fields} if fields is None else {*main_fields}, fields
        self._prefix, self._group = "", list[_Entry]()
        self._ignored, self._errors = list[str](), list[str]()
        self._keys, self._names = list[str](), bytearray()
        self._sizes, self._bounds, self._firsts = array("q"), array("q", [0]), array("q", [0])
        self._fields, self._field_indices = dict[str, int](), array("i")

    def add(self, name: bytes, size: int) -> str | None:
        """Add an entry. If the entry's name has no suffix, return the name, because the value must then be an image."""
        try:
            text = name.decode()
        except UnicodeDecodeError:
            self._errors.append(f"{name!r} is not UTF-8, so it cannot be a key")
            return None
        base = text.rfind("/") + 1
        if text.startswith("__", base):
            self._ignored.append(text)
            return None
        stem, dot, _ = text[base:].partition(".")
        prefix = text[:base] + stem
        if prefix != self._prefix or not dot:
            self._end_group()
        if not dot:
            self._add_named(text, [(_Entry(text, size), IMAGE)])
            return text
        self._prefix = prefix
        self._group.append(_Entry(text, size))
        return None

    def finish(self) -> _Entries:
        self._end_group()
        self._refuse_equal_keys()
        if self._errors:
            raise PackError("\n".join([f"{self._path} cannot be packed:", *list_some(self._errors)]))
        return _Entries(
            keys=self._keys,
            sizes=np.array(self._sizes, np.int64),
            names=bytes(self._names),
            bounds=np.array(self._bounds, np.int64),
            first_entries=np.array(self._firsts, np.int64),
            fields=tuple(self._fields),
            field_indices=np.array(self._field_indices, np.int32),
            ignored=self._ignored,
        )

    def number(self, entries: Iterable[tuple[bytes, memoryview]], num_samples: int) -> _Entries:
        sizes = {kind: np.full(num_samples, -1, np.int64) for kind in _NUMBERED}
        for name, value in entries:
            kind, _, number = bytes(name).partition(b"-")
            if kind in sizes and len(number) == 9 and number.isdigit() and 1 <= int(number) <= num_samples:
                sizes[kind][int(number) - 1] = len(value)
            elif name != b"num-samples":
                self._ignored.append(bytes(name).decode(errors="backslashreplace"))
        for row in np.flatnonzero(sizes[b"image"] < 0).tolist():
            self._errors.append(f"there is no entry 'image-{row + 1:09d}', but 'num-samples' is {num_samples}")
        if not self._errors:
            columns = [(text.decode(), field, sizes[text].tolist()) for text, field in _NUMBERED.items()]
            for row in range(num_samples):
                digits = f"{row + 1:09d}"
                found = [(f"{text}-{digits}", field, column[row]) for text, field, column in columns]
                self._add(digits, [entry for entry in found if entry[2] >= 0])
        return self.finish()

    def _end_group(self) -> None:
        """Add the samples of a group of entries whose names are equal up to the first dot."""
        group, self._group = self._group, []
        if not group:
            return
        suffixes = [entry.name[len(self._prefix) + 1 :] for entry in group]
        if not any("." in suffix for suffix in suffixes):
            self._add_named(
                self._prefix, [(entry, suffix.lower()) for entry, suffix in zip(group, suffixes, strict=True)]
            )
            return
        has_main = any(suffix.lower() in self._main for suffix in suffixes)
        samples = defaultdict[str, list[tuple[_Entry, str]]](list)
        for entry, suffix in zip(group, suffixes, strict=True):
            # If there is an a.jpg, a.mask.png is a field of the same sample, but a.1.jpg is another image.
            middle = suffix.rpartition(".")[0]
            is_field = not middle or (has_main and not self._rename_dots and not middle.isdigit())
            stem = self._prefix if is_field else f"{self._prefix}.{middle}"
            samples[stem].append((entry, entry.name[len(stem) + 1 :].lower()))
        for stem, entries in samples.items():
            self._add_named(stem, entries)

    def _add_named(self, stem: str, entries: Sequence[tuple[_Entry, str]]) -> None:
        """Add a sample, or an error if the entries are invalid. Ignore entries without a main field."""
        if not any(field in self._main for _, field in entries):
            self._ignored += (entry.name for entry, _ in entries)
            return
        if self._wanted is not None:
            self._ignored += (entry.name for entry, field in entries if field not in self._wanted)
            entries = [(entry, field) for entry, field in entries if field in self._wanted]
        folder, slash, base = stem.rpartition("/")
        if "." in base and not self._rename_dots:
            self._errors.append(
                f"{entries[0][0].name!r} has a dot in its stem, but a key ends at the first dot: pass --rename-dots "
                "(rename_dots=True)"
            )
            return
        key = folder + slash + base.replace(".", "_")
        fields = [field for _, field in entries]
        if len(set(fields)) < len(fields) or sum(field in self._main for field in fields) > 1:
            names = " and ".join(repr(entry.name) for entry, _ in entries)
            self._errors.append(
                f"{names} belong to one sample, but would become the same field or several images: keep one of them"
            )
            return
        try:
            check_key(key)
            for _, field in entries:
                if field and field not in self._fields:  # Known fields have already been checked.
                    check_name(key, field)
        except ValueError as error:
            self._errors.append(f"{entries[0][0].name!r} cannot be packed: {error}")
            return
        self._add(key, [(entry.name, field, entry.size) for entry, field in entries])

    def _refuse_equal_keys(self) -> None:
        seen = set[str]()
        for key in self._keys:
            if key in seen:
                self._errors.append(f"two samples have the key {key!r}: rename or remove one of them")
            seen.add(key)

    def _add(self, key: str, entries: Sequence[tuple[str, str, int]]) -> None:
        self._keys.append(key)
        self._sizes.append(sum(size for _, _, size in entries))
        for name, field, _ in entries:
            self._names += name.encode()
            self._bounds.append(len(self._names))
            self._field_indices.append(self._fields.setdefault(field, len(self._fields)))
        self._firsts.append(len(self._field_indices))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Environment:
    """An LMDB environment: see :class:`~shardio.packing.sources.records.Records`."""

    path: Path
    files: tuple[SourceFile, ...]
    rename_dots: bool
    main_fields: tuple[str, ...]
    fields: tuple[str, ...] | None
    transaction: int = 0

    def open(self) -> _Reader:
        return _Reader(self)

    def describe(self, row: int) -> str:
        names = ", ".join(repr(name.decode(errors="replace")) for name, _ in _find_entries(self).take(row))
        return f"sample {row} ({names})"


class _Reader:
    """A reader of samples: see :class:`~shardio.packing.sources.records.RecordReader`."""

    def __init__(self, source: _Environment) -> None:
        self._source, self._entries = source, _find_entries(source)
        self._environment = _open(source.path)

    def read(self, row: int) -> Mapping[str, bytes]:
        found = dict[str, bytes]()
        with _explaining(self._source.path), self._environment.begin() as transaction:
            for name, field in self._entries.take(row):
                content = transaction.get(name)
                if content is None:
                    raise ValueError(f"there is no entry {name.decode()!r}")
                if field == IMAGE and _PICKLE.fullmatch(content):
                    raise ValueError(_explain_pickle(name.decode()))
                found[field] = content
        if self._environment.info()["last_txnid"] != self._source.transaction:
            raise FileChangedError(Path(self._source.files[0].path), "changed: another process wrote to it")
        return found


class LmdbEnvironment(PackSource):
    """An LMDB environment: a directory with ``data.mdb``, or a file."""

    what = "an LMDB environment"
    takes = ("fields",)

    def find(self, src: Path) -> Evidence | None:
        if src.is_dir():
            return next(map(Evidence, filter(Path.is_file, [src / "data.mdb"])), None)
        is_lmdb = src.is_file() and stat_file(str(src)).size >= 20 and _read_start(src)[16:20] == _MAGIC
        return Evidence(src) if is_lmdb else None

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Scan an LMDB environment. Names become keys, suffixes become fields, and values are not decoded.

        Raises:
            PackError: If the environment cannot be read, or holds values that are not files.
        """
        file = stat_file(str(src / "data.mdb" if src.is_dir() else src))
        with _open(src) as environment:
            transaction = environment.info()["last_txnid"]
        records = _Environment(
            path=src,
            files=(file,),
            rename_dots=options.rename_dots,
            main_fields=tuple(sorted(options.main_fields)),
            fields=options.fields,
            transaction=transaction,
        )
        entries = _find_entries(records)
        if not len(entries):
            found = f" such as {entries.ignored[0]!r}" if entries.ignored else ""
            raise PackError(
                f"{src} holds no images that can be packed: an image's name must have no suffix, or one of "
                f"{', '.join(IMAGE_FIELDS)}. The environment has "
                f"{count(len(entries.ignored), 'other entry', 'other entries')}{found}. {_USE_ITERABLE}"
            )
        scan = RecordScan(
            records=records,
            sizes=entries.sizes,
            num_fields=max(1, round(entries.num_entries / max(1, len(entries)))),
            keys=entries.keys,
            ignored=[src / name for name in entries.ignored],
        )
        return scan_records(scan, options)


@lru_cache(maxsize=1)
def _find_entries(source: _Environment) -> _Entries:
    """Return the entries of each sample. Read only names, sizes, and some values whose names have no suffix."""
    names = _EntryNames(
        source.path, rename_dots=source.rename_dots, main_fields=source.main_fields, fields=source.fields
    )
    are_images = dict[str, bool]()
    environment = _open(source.path)
    try:
        check_unchanged(source.files[0])
        with _explaining(source.path), environment.begin(buffers=True) as transaction:
            num_samples = transaction.get(b"num-samples")
            if num_samples is not None:
                return names.number(transaction.cursor(), _parse_count(source.path, bytes(num_samples)))
            for name, value in transaction.cursor():
                text = names.add(bytes(name), len(value))
                if name[:2] == b"__":
                    _refuse_pickle(source.path, bytes(name), bytes(value))
                elif text is not None and len(are_images) < _PROBED:
                    _refuse_pickle(source.path, bytes(name), bytes(value))
                    are_images[text] = find_format(bytes(value)) is not None
    finally:
        environment.close()
    if are_images and not any(are_images.values()):
        raise PackError(
            f"{source.path} cannot be packed: the value of {next(iter(are_images))!r} is not an image, and the name "
            f"has no suffix that shows its type. {_USE_ITERABLE}"
        )
    return names.finish()


def _open(path: Path) -> Any:
    with requiring("lmdb", path, "pip install 'shardio-loader[lmdb]'"):
        import lmdb
    with _explaining(path):
        environment = lmdb.open(
            str(path), subdir=path.is_dir(), readonly=True, lock=False, readahead=False, create=False
        )
        # Reading a page beyond the end of the file would kill this process.
        expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        size = stat_file(str(path / "data.mdb" if path.is_dir() else path)).size
        if size < expected:
            environment.close()
            raise PackError(
                f"{path} is truncated: it has {size} bytes, expected at least {expected}. Copy or download it again"
            )
    return environment


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    import lmdb

    try:
        yield
    except lmdb.Error as error:
        is_open = "already open" in str(error)
        hint = "Close it first" if is_open else "If a copy is unfinished or damaged, copy or download it again"
        raise PackError(f"{path} cannot be read by the lmdb package: {error}. {hint}") from error


def _read_start(path: Path) -> bytes:
    with closing(parse_location(path).open()) as file:
        return file.read(0, 20)


def _parse_count(path: Path, value: bytes) -> int:
    if not value.isdigit():
        raise PackError(f"the entry 'num-samples' of {path} must be a number, got {value[:40]!r}")
    return int(value)


def _refuse_pickle(path: Path, name: bytes, value: bytes) -> None:
    if _PICKLE.fullmatch(value):
        raise PackError(f"{path} cannot be packed: {_explain_pickle(name.decode(errors='replace'))}")


def _explain_pickle(name: str) -> str:
    return (
        f"the value of {name!r} is a pickle, as written by folder2lmdb. Reading a pickle can run arbitrary code, so "
        f"shardio does not read pickles. {_USE_ITERABLE}"
    )
