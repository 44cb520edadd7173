"""LMDB environments whose entries are files: named images with further fields, or text recognition's numbered pairs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardio.errors import PackError
from shardio.images import IMAGE_FIELDS, find_format
from shardio.packing.sources.entry_names import Entries, EntryNames
from shardio.packing.sources.files import FileChangedError, SourceFile, check_unchanged, stat_file
from shardio.packing.sources.records import IMAGE, RecordScan
from shardio.packing.sources.source import Evidence, SourceOptions
from shardio.storage import parse_location

_MAGIC = b"\xde\xc0\xef\xbe"
"""LMDB's magic number, at byte 16 of its file."""

_PROBED = 100
"""The number of values that are examined before packing starts, of those whose names have no suffix."""

_PICKLE = re.compile(rb"\x80[\x02-\x05].*\.", re.DOTALL)
"""A pickle of protocol 2 or later. No image has this signature."""

_USE_ITERABLE = (
    "Read the samples with the program that knows their format, and pack what it yields: "
    "shardio.pack(iterable, out), or shardio.ShardWriter"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Environment:
    """An LMDB environment: see :class:`~shardio.packing.sources.records.Records`.

    Attributes:
        path: The environment.
        files: The file of its data.
        rename_dots: Whether each dot in the stem of a name becomes an underscore.
        main_fields: The fields that make an entry a sample.
        fields: The fields to pack; None for all.
        transaction: The number of the last transaction that changed it.
    """

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
    """Reads samples: see :class:`~shardio.packing.sources.records.RecordReader`."""

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


def find_lmdb(src: Path) -> Evidence | None:
    """Find the file of an LMDB environment, which is a directory with ``data.mdb``, or a file."""
    if src.is_dir():
        return next(map(Evidence, filter(Path.is_file, [src / "data.mdb"])), None)
    is_lmdb = src.is_file() and stat_file(str(src)).size >= 20 and _read_start(src)[16:20] == _MAGIC
    return Evidence(src) if is_lmdb else None


def scan_lmdb(src: Path, options: SourceOptions) -> RecordScan:
    """Scan an LMDB environment. Names become keys, and their suffixes fields; values are not decoded.

    Raises:
        PackError: If it cannot be read, or holds values that are not files.
    """
    file = stat_file(str(src / "data.mdb" if src.is_dir() else src))
    environment = _open(src)
    try:
        transaction = environment.info()["last_txnid"]
    finally:
        environment.close()
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
            f"{src} holds no images that can be packed: an image's name has no suffix, or one of "
            f"{', '.join(IMAGE_FIELDS)}. It has {len(entries.ignored)} other entries{found}. {_USE_ITERABLE}"
        )
    return RecordScan(
        records=records,
        sizes=entries.sizes,
        num_fields=max(1, round(entries.num_entries / max(1, len(entries)))),
        keys=entries.keys,
        ignored=[src / name for name in entries.ignored],
    )


@lru_cache(maxsize=1)
def _find_entries(source: _Environment) -> Entries:
    """Return the entries of each sample. Only names and sizes are read, and the first values without a suffix.

    Raises:
        PackError: If names or values cannot be packed.
        FileChangedError: If the environment has changed since the scan.
    """
    names = EntryNames(
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
            f"has no suffix that says what it is. {_USE_ITERABLE}"
        )
    return names.finish()


def _open(path: Path) -> Any:
    """Open an environment to read it.

    Raises:
        PackError: If the package is missing, or the environment is damaged or already open.
    """
    try:
        import lmdb
    except ImportError as error:
        raise PackError(f"{path} is read by the package lmdb ({error}): pip install 'shardio-loader[lmdb]'") from error
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
    """Turn errors of LMDB into PackErrors."""
    import lmdb

    try:
        yield
    except lmdb.Error as error:
        hint = (
            "Close it first"
            if "already open" in str(error)
            else "If a copy is unfinished or damaged, copy or download it again"
        )
        raise PackError(f"{path} cannot be read by the package lmdb: {error}. {hint}") from error


def _read_start(path: Path) -> bytes:
    file = parse_location(path).open()
    try:
        return file.read(0, 20)
    finally:
        file.close()


def _parse_count(path: Path, value: bytes) -> int:
    if not value.isdigit():
        raise PackError(f"the entry 'num-samples' of {path} must be a number, got {value[:40]!r}")
    return int(value)


def _refuse_pickle(path: Path, name: bytes, value: bytes) -> None:
    if _PICKLE.fullmatch(value):
        raise PackError(f"{path} cannot be packed: {_explain_pickle(name.decode(errors='replace'))}")


def _explain_pickle(name: str) -> str:
    return (
        f"the value of {name!r} is a pickle, as folder2lmdb writes them. Reading a pickle can run any code, so shardio "
        f"reads none. {_USE_ITERABLE}"
    )
