"""Pack datasets in the MDS format of MosaicML Streaming, which the package ``mosaicml-streaming`` reads."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardio.errors import PackError
from shardio.libraries import import_torchvision
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import dump_json, encode_array, encode_pixels
from shardio.packing.sources.records import Columns, FileSeries, RecordScan, choose_columns, name_field, scan_records
from shardio.packing.sources.source import Evidence, PackSource, SourceFile, SourceScan, requiring, stat_file
from shardio.process import describe_error, let_through
from shardio.storage import StoredFile, parse_location
from shardio.values import format_bytes, parse_json

INDEX = "index.json"

_SPLITS = ("train", "val", "valid", "validation", "test")

_CONTENTS = {"bytes": "", "jpeg": "jpg", "pil": "", "png": "png"}
"""The encodings of file contents, and the suffix of each."""

_LISTS = {"jpeg_array": 0, "jpegarray": 0, "list[jpeg]": 4, "list[pil]": 4, "list[png]": 4}
"""The encodings of lists of images, and the number of bytes that precede the image count in each of them."""

_PLAIN = (
    *("json", "str", "str_decimal", "str_float", "str_int", "int", "float16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
"""The encodings of values for the ``json`` field."""

_LABELS = ("label", "class", "y")
"""The usual names of label columns, from Streaming's documentation and image datasets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexKind:
    """The features that identify a tool's ``index.json``.

    Attributes:
        entries: The name of the list of files in the JSON object.
        key: A key of each object in that list.
        pattern: The pattern of the files beside ``index.json`` that identify the tool if ``index.json`` is damaged.
    """

    entries: str
    key: str
    pattern: str


_KIND = IndexKind(entries="shards", key="column_encodings", pattern="*.mds*")


def split_contents(value: bytes) -> list[bytes]:
    """Return the images of a list that MosaicML Streaming or LitData wrote as one value.

    The value contains the number of images and the size of each image, as uint32, followed by the images.

    Raises:
        ValueError: If the sizes do not add up to the size of the value.
    """
    if len(value) < 4:
        raise ValueError(f"a list of images has only {len(value)} bytes")
    (num_contents,) = np.frombuffer(value, "<u4", 1).tolist()
    start = 4 + 4 * num_contents
    if len(value) < start:
        raise ValueError(f"a list of {num_contents} images has only {len(value)} bytes")
    ends = start + np.cumsum(np.frombuffer(value, "<u4", num_contents, 4), dtype=np.int64)
    if len(value) != (int(ends[-1]) if num_contents else start):
        raise ValueError(f"a list of images has {len(value)} bytes, which is not the sum of their sizes")
    return [value[begin:end] for begin, end in zip([start, *ends[:-1].tolist()], ends.tolist(), strict=False)]


def find_index(src: Path, kind: IndexKind) -> Evidence | None:
    """Find the ``index.json`` that a tool wrote in a directory, or in one of its splits."""
    found = (src / split for split in (".", *_SPLITS) if _matches(src / split, kind))
    return next((Evidence(folder / INDEX) for folder in found), None)


def read_index(src: Path, kind: IndexKind) -> Mapping[str, Any]:
    """Return the content of a directory's ``index.json``.

    Raises:
        PackError: If the directory consists of splits, or the file cannot be read.
    """
    if not (src / INDEX).is_file():
        splits = _find_splits(src, kind)
        raise PackError(
            f"{src} holds the splits {', '.join(splits)}: pack each, for example {src / splits[0] if splits else src}"
        )
    try:
        found = parse_json(parse_location(src / INDEX).read_whole())
    except (OSError, ValueError) as error:
        raise PackError(f"{src / INDEX} cannot be read: {error}. Download or create it again") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def invalid_index_is_an_error(src: Path) -> Iterator[None]:
    """Raise PackError if the block fails because ``index.json`` lacks a value or has a value of the wrong type."""
    try:
        yield
    except (AttributeError, KeyError, TypeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise PackError(f"{src / INDEX} is invalid: {what}. Download or create it again") from error


def _resolve(src: Path, name: object) -> Path:
    if not isinstance(name, str) or not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise PackError(f"{src / INDEX} names the file {name!r}, which is not below {src}: create {INDEX} again")
    return src / name


class ListedShard(NamedTuple):
    """A file of samples that ``index.json`` names.

    Attributes:
        name: The name of the decompressed file.
        num_bytes: The size of the decompressed file in bytes.
        packed: The name of the compressed file, or None if the file is not compressed.
        packed_bytes: The size of the compressed file in bytes, or None if the size is unknown.
        may_be_larger: Whether the decompressed file may be larger than ``num_bytes``.
    """

    name: str
    num_bytes: int
    packed: str | None
    packed_bytes: int | None = None
    may_be_larger: bool = False


def find_files(
    src: Path, parts: Sequence[ListedShard], find_decompress: Callable[[ListedShard], Callable[[bytes], bytes]]
) -> tuple[tuple[SourceFile, ...], TemporaryFolder | None]:
    """Return the files of a dataset, and the folder of newly decompressed files, if any.

    MosaicML Streaming and LitData leave decompressed files beside the compressed files. This function uses such files.

    Args:
        src: The dataset.
        parts: The files that ``index.json`` names.
        find_decompress: Returns the function that decompresses the content of a file.

    Raises:
        PackError: If a file is missing, damaged, or not below the dataset, or the disk has too little space.
    """
    paths, packed = [src / INDEX], list[tuple[Path, ListedShard]]()
    for part in parts:
        path = _resolve(src, part.name)
        if part.packed is None or (path.is_file() and stat_file(str(path)).size >= part.num_bytes):
            _check_size(src, path, part.num_bytes, at_least=part.may_be_larger)
        else:
            path = _resolve(src, part.packed)
            _check_size(src, path, part.packed_bytes or 1, at_least=part.packed_bytes is None)
            packed.append((path, part))
        paths.append(path)
    files = tuple(stat_file(str(path)) for path in paths)
    if not packed:
        return files, None
    decompress = [find_decompress(part) for _, part in packed]
    folder = TemporaryFolder(sum(part.num_bytes for _, part in packed), src)
    for (path, part), each in zip(packed, decompress, strict=True):
        _unpack(path, folder.path / part.name, part.num_bytes, each)
    return files, folder


def _check_size(src: Path, path: Path, num_bytes: int, *, at_least: bool) -> None:
    try:
        size = stat_file(str(path)).size
    except OSError as error:
        raise PackError(f"{path}, which {src / INDEX} names, cannot be read: {error.strerror or error}") from error
    if size < num_bytes or (size > num_bytes and not at_least):
        raise PackError(
            f"{path} has {size} bytes, but {num_bytes} according to {src / INDEX}: download or create it again"
        )


def _find_splits(src: Path, kind: IndexKind) -> list[str]:
    return [split for split in _SPLITS if _matches(src / split, kind)]


def _matches(folder: Path, kind: IndexKind) -> bool:
    if not (folder / INDEX).is_file():
        return False
    try:
        found = parse_json(parse_location(folder / INDEX).read_whole())
    except (OSError, ValueError):
        return next(folder.glob(kind.pattern), None) is not None
    entries = found.get(kind.entries) if isinstance(found, dict) else None
    return isinstance(entries, list) and all(isinstance(entry, dict) and kind.key in entry for entry in entries)


class TemporaryFolder:
    """A folder that is removed when this object is deleted, or when the process that created the folder ends.

    Worker processes receive copies of this object, which do not remove the folder.

    Args:
        num_bytes: The total size of the files for which the folder needs space.
        src: The source of the files, for messages.

    Attributes:
        path: The folder.

    Raises:
        PackError: If the disk has too little space for the files.
    """

    def __init__(self, num_bytes: int, src: Path) -> None:
        parent = Path(tempfile.gettempdir())
        free = shutil.disk_usage(parent).free
        if free < num_bytes:
            raise PackError(
                f"{src} is compressed. Its files take up {format_bytes(num_bytes)} when decompressed, but "
                f"{parent} has only {format_bytes(free)} of free space: set the environment variable TMPDIR to a "
                "folder on a larger disk"
            )
        self.path = Path(tempfile.mkdtemp(prefix="shardio-", dir=parent))
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path


def find_folder(src: Path, unpacked: TemporaryFolder | None, name: str) -> Path:
    """Return the folder that contains a file: the folder of decompressed files, or the source itself."""
    return unpacked.path if unpacked is not None and (unpacked.path / name).exists() else src


def _unpack(src: Path, dst: Path, num_bytes: int, decompress: Callable[[bytes], bytes]) -> None:
    try:
        content = decompress(parse_location(src).read_whole())
    except Exception as error:  # Each compression library raises its own errors.
        let_through(error)
        raise PackError(f"{src} cannot be decompressed: {error}. Download or create it again") from error
    if len(content) < num_bytes:
        raise PackError(f"{src} has {len(content)} bytes when decompressed, not {num_bytes}: create it again")
    dst.parent.mkdir(parents=True, exist_ok=True)
    with parse_location(dst).write_whole() as file:
        file.write(content)


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # A forked process must not remove the folder.
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedRecords:
    """The samples of a dataset with an ``index.json``: see :class:`~shardio.packing.sources.records.Records`.

    Attributes:
        path: The dataset.
        files: The dataset's files.
        series: The dataset's files of samples.
        columns: The roles of the dataset's columns.
        unpacked: The folder of decompressed files, or None if no file was decompressed.
    """

    path: Path
    files: tuple[SourceFile, ...]
    series: FileSeries
    columns: Columns
    unpacked: TemporaryFolder | None = field(default=None, repr=False, compare=False)

    def describe(self, row: int) -> str:
        """Return the name of a sample for messages."""
        return self.series.describe(row)


@contextmanager
def any_error_is_a_value_error() -> Iterator[None]:
    """Raise ValueError for any error in the block.

    Neither Streaming nor LitData has an error class for damaged samples.
    """
    try:
        yield
    except Exception as error:
        let_through(error)
        raise ValueError(describe_error(error)) from error


class _Shards(IndexedRecords):
    __slots__ = ()

    def open(self) -> _Reader:
        streaming = _import_streaming(self.path)
        shards = _open_shards(streaming, self.path, read_index(self.path, _KIND)["shards"], self.unpacked)
        return _Reader(streaming, shards, self.series, self.columns)


class _Reader:
    """A reader of samples: see :class:`~shardio.packing.sources.records.RecordReader`."""

    def __init__(self, streaming: _Streaming, shards: Sequence[Any], series: FileSeries, columns: Columns) -> None:
        self._streaming, self._shards, self._series, self._columns = streaming, shards, series, columns
        self._encodings = dict(zip(shards[0].column_names, shards[0].column_encodings, strict=True))
        for shard in shards:
            shard.column_encodings = ["bytes"] * len(self._encodings)  # Images are not decoded.

    def read(self, row: int) -> Mapping[str, bytes]:
        number, sample = self._series.find(row)
        shard = self._shards[number]
        with any_error_is_a_value_error():
            content = shard.get_sample_data(sample)
            sizes = np.frombuffer(content, "<u4", shard.column_sizes.count(None)).tolist()
            if sum(sizes) + 4 * len(sizes) + sum(size or 0 for size in shard.column_sizes) != len(content):
                raise ValueError(f"its columns do not have {len(content)} bytes: download or create the shard again")
            values = shard.decode_sample(content)
            found, plain = dict[str, bytes](), dict[str, Any]()
            for name, encoding in self._encodings.items():
                if encoding in _CONTENTS:
                    value = self._make_content(encoding, values[name])
                    found[name_field(self._columns, name, value, _CONTENTS[encoding])] = value
                elif encoding in _LISTS:
                    found |= self._read_list(name, encoding, values[name])
                elif name in self._columns.others:
                    plain[name] = _decode(self._streaming, encoding, values[name])
            found |= {f"{name.lower()}.npy": encode_array(value) for name, value in plain.items() if _is_array(value)}
            plain = {name: value for name, value in plain.items() if not _is_array(value)}
            return {**found, "json": dump_json(plain)} if plain else found

    def _make_content(self, encoding: str, value: bytes) -> bytes:
        return encode_pixels(self._streaming.decode(encoding, value)) if encoding == "pil" else value

    def _read_list(self, name: str, encoding: str, value: bytes) -> dict[str, bytes]:
        """Return the fields of several images, such as ``views.0.jpg``."""
        kind = "pil" if encoding == "list[pil]" else "jpeg" if "jpeg" in encoding else "png"
        contents = [self._make_content(kind, content) for content in split_contents(value[_LISTS[encoding] :])]
        return {name_field(Columns(), f"{name}.{i}", each, _CONTENTS[kind]): each for i, each in enumerate(contents)}


class _Streaming(NamedTuple):
    """The functions of Streaming that this module calls."""

    make_reader: Callable[..., Any]
    decode: Callable[[str, bytes], Any]
    decompress: Callable[[str, bytes], bytes]


class MdsShards(PackSource):
    """A directory that ``MDSWriter`` wrote, or one of its splits."""

    what = "MDS shards"

    def find(self, src: Path) -> Evidence | None:
        return find_index(src, _KIND)

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Scan a directory that ``MDSWriter`` wrote. Compressed shards are decompressed into a temporary folder.

        Raises:
            PackError: If there are several splits, a shard is missing or damaged, or the columns cannot be packed.
        """
        streaming, entries = _import_streaming(src), read_index(src, _KIND).get("shards") or []
        with invalid_index_is_an_error(src):
            encodings = _find_encodings(src, entries)
            columns = choose_columns(
                src,
                list(encodings),
                contents=[name for name, encoding in encodings.items() if encoding in _CONTENTS],
                labels=next(([name] for name in _LABELS if encodings.get(name) in _PLAIN), []),
                options=options,
            )
            files, unpacked = _find_files(streaming, src, entries)
        shards = _open_shards(streaming, src, entries, unpacked)
        sizes = list[NDArray[np.int64]]()
        values: dict[str, list[Any]] = {name: [] for name in (columns.key, columns.label) if name is not None}
        for shard in shards:
            path = Path(shard.dirname, shard.raw_data.basename)
            try:
                sizes.append(_read_values(streaming, shard, path, values))
            except Exception as error:  # Streaming's decoders check little.
                let_through(error)
                raise PackError(
                    f"{path} cannot be read: {describe_error(error)}. Download or create it again"
                ) from error
        found = RecordScan(
            records=_Shards(
                path=src,
                files=files,
                series=FileSeries.of([shard.raw_data.basename for shard in shards], [len(shard) for shard in shards]),
                columns=columns,
                unpacked=unpacked,
            ),
            sizes=np.concatenate(sizes) if sizes else np.zeros(0, np.int64),
            num_fields=sum(encoding not in _PLAIN for encoding in encodings.values()) + 1,
            keys=None if columns.key is None else values[columns.key],
            labels=None if columns.label is None else values[columns.label],
        )
        return scan_records(found, options)


def _find_encodings(src: Path, entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found = dict[str, str]()
    for number, entry in enumerate(entries):
        if (entry.get("format"), entry.get("version")) != ("mds", 2):
            raise PackError(
                f"shard {number} in {src / INDEX} has the format {entry.get('format')!r}, version "
                f"{entry.get('version')!r}: only MDS version 2 can be packed. Pack an iterable of its samples"
            )
        encodings = dict(zip(entry["column_names"], entry["column_encodings"], strict=False))
        if number and encodings != found:
            raise PackError(f"shards 0 and {number} in {src / INDEX} have different columns: pack them separately")
        found = encodings
    for name, encoding in found.items():
        if encoding == "pkl":
            raise PackError(
                f"the column {name!r} of {src} holds pickles, which can run arbitrary code when they are read. If you "
                "trust them, read the samples yourself, and pack an iterable of them"
            )
        if not (encoding in (*_CONTENTS, *_LISTS, *_PLAIN) or encoding.partition(":")[0] == "ndarray"):
            raise PackError(
                f"the column {name!r} of {src} has the encoding {encoding!r}, which shardio does not support: read "
                "the samples yourself, and pack an iterable of them"
            )
    return found


def _find_files(
    streaming: _Streaming, src: Path, entries: Sequence[Mapping[str, Any]]
) -> tuple[tuple[SourceFile, ...], TemporaryFolder | None]:
    parts, compressions = list[ListedShard](), dict[str, str]()
    for entry in entries:
        raw, packed = entry["raw_data"], entry.get("zip_data") or {"basename": None, "bytes": None}
        parts.append(ListedShard(raw["basename"], raw["bytes"], packed["basename"], packed["bytes"]))
        compressions[raw["basename"]] = entry["compression"]
    return find_files(src, parts, lambda part: partial(streaming.decompress, compressions[part.name]))


def _open_shards(
    streaming: _Streaming, src: Path, entries: Sequence[Mapping[str, Any]], unpacked: TemporaryFolder | None
) -> list[Any]:
    folders = [find_folder(src, unpacked, entry["raw_data"]["basename"]) for entry in entries]
    shards = list[Any]()
    try:
        shards.extend(map(streaming.make_reader, map(str, folders), repeat(None), entries))
    except Exception as error:  # Streaming checks little.
        let_through(error)
        raise PackError(f"shard {len(shards)} in {src / INDEX} is invalid: {describe_error(error)}") from error
    return shards


def _read_values(streaming: _Streaming, shard: Any, path: Path, values: Mapping[str, list[Any]]) -> NDArray[np.int64]:
    """Append values of a shard to lists, without reading images. Return the size of each sample, int64 [n]."""
    with closing(parse_location(path).open()) as file:
        offsets = np.frombuffer(file.read(4, 4 * (shard.samples + 2)), "<u4").astype(np.int64)
        sizes: NDArray[np.int64] = np.diff(offsets)
        if (sizes < 0).any() or offsets[-1] != file.size:
            raise ValueError("the positions of its samples are invalid")
        if values and len(sizes):
            stops = _find_columns(shard, file, offsets)
            for name, found in values.items():
                column = shard.column_names.index(name)
                contents = file.read_many(stops[:, column], stops[:, column + 1])
                found += [_decode(streaming, shard.column_encodings[column], content) for content in contents]
    return sizes


def _find_columns(shard: Any, file: StoredFile, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offsets of each sample's columns, and of the end of its last column: int64 [n, columns + 1]."""
    is_variable = np.array([size is None for size in shard.column_sizes])
    starts = offsets[:-1] + 4 * int(is_variable.sum())
    heads = b"".join(file.read_many(offsets[:-1], starts))
    sizes = np.tile(np.array([size or 0 for size in shard.column_sizes], np.int64), (len(starts), 1))
    sizes[:, is_variable] = np.frombuffer(heads, "<u4").reshape(len(starts), -1)
    found: NDArray[np.int64] = np.cumsum(np.column_stack([starts, sizes]), axis=1)
    if (wrong := np.flatnonzero(found[:, -1] != offsets[1:])).size:
        raise ValueError(
            f"the columns of sample {wrong[0]} do not have {offsets[wrong[0] + 1] - starts[wrong[0]]} bytes"
        )
    return found


def _decode(streaming: _Streaming, encoding: str, value: bytes) -> Any:
    if encoding == "str_decimal":
        encoding = "str"  # JSON has no decimal type, so decimals are kept as text.
    found = streaming.decode(encoding, value)
    return found.item() if isinstance(found, np.generic) else found


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _import_streaming(src: Path) -> _Streaming:
    with requiring("mosaicml-streaming", src, "install it with --no-deps, as docs/packing.md describes"):
        import_torchvision()  # Streaming imports it.
        from streaming.base.compression import decompress
        from streaming.base.format import reader_from_json
        from streaming.base.format.mds.encodings import mds_decode
    return _Streaming(reader_from_json, mds_decode, decompress)
