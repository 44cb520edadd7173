"""Pack the chunks of Lightning's LitData, which the ``litdata`` package reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardio.errors import PackError
from shardio.packing.pack_call import PackOptions
from shardio.packing.samples import dump_json, encode_array, encode_pixels
from shardio.packing.sources.mds import (
    INDEX,
    IndexedRecords,
    IndexKind,
    ListedShard,
    TemporaryFolder,
    any_error_is_a_value_error,
    find_files,
    find_folder,
    find_index,
    invalid_index_is_an_error,
    read_index,
    split_contents,
)
from shardio.packing.sources.records import Columns, FileSeries, RecordScan, choose_columns, name_field, scan_records
from shardio.packing.sources.source import Evidence, PackSource, SourceFile, SourceScan, requiring
from shardio.process import describe_error, let_through
from shardio.values import parse_json

CONTENTS = dict.fromkeys(("bytes", "file", "image", "mesh", "pil"), "")
CONTENTS |= {"audio": "wav", "jpeg": "jpg", "nifti": "nii", "pdf": "pdf", "tiff": "tif", "tifffile": "tif"}
CONTENTS |= {"video": "mp4"}
"""The formats of file contents, and their default suffixes. A format such as ``image:png`` names a different suffix."""

LISTS = ("jpeg_array",)
"""The formats of lists of images."""

ARRAYS = ("no_header_numpy", "no_header_tensor", "numpy", "tensor")
"""The formats of arrays."""

PLAIN = ("bool", "float", "int", "json", "str", "text")
"""The formats of values that go into the ``json`` field."""

_RUNNING_CODE = ("graph", "pickle")
"""The formats that LitData reads by unpickling them."""

_NUM_MAPPED = 64
"""The number of chunks that a process maps at a time."""

_KIND = IndexKind(entries="chunks", key="chunk_bytes", pattern="chunk-*.bin")
_LABELS = ("label", "class", "y", "target")
_NODES = ("builtins.dict", "builtins.list", "builtins.tuple")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A value that each sample has."""

    keys: tuple[Hashable, ...]
    format: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.keys)) or "0"

    @property
    def kind(self) -> str:
        return self.format.partition(":")[0]

    @property
    def suffix(self) -> str:
        """The suffix of the content, or "" if the suffix is unknown."""
        return self.format.partition(":")[2].lower() or CONTENTS[self.kind]

    def get(self, sample: Any) -> Any:
        for key in self.keys:
            sample = sample[key]
        return sample


def _find_leaves(src: Path, config: Mapping[str, Any]) -> tuple[_Leaf, ...]:
    if config.get("encryption"):
        raise PackError(f"{src} is encrypted: decrypt the samples with LitData, and pack an iterable of them")
    if config.get("item_loader") not in (None, "PyTreeLoader") or not config["data_spec"]:
        raise PackError(
            f"{src} was written for LitData's {config.get('item_loader')}: only samples of the default PyTreeLoader "
            "can be packed. Read other samples with LitData, and pack an iterable of them"
        )
    keys = list(_find_keys(src, parse_json(config["data_spec"])[1], ()))
    leaves = tuple(_Leaf(keys=each, format=name) for each, name in zip(keys, config["data_format"], strict=False))
    if not len(keys) == len(config["data_format"]) == len({leaf.name for leaf in leaves}):
        raise PackError(f"{src / INDEX} is invalid: data_format does not match data_spec. Create it again")
    for leaf in leaves:
        if leaf.kind in _RUNNING_CODE:
            raise PackError(
                f"the value {leaf.name!r} of each sample of {src} has the format {leaf.format!r}: it is a pickle, "
                "which can run arbitrary code when it is read. If you trust it, read the samples with LitData, and "
                "pack an iterable of them"
            )
        if leaf.kind not in (*CONTENTS, *LISTS, *ARRAYS, *PLAIN):
            raise PackError(
                f"the value {leaf.name!r} of each sample of {src} has the format {leaf.format!r}, which shardio does "
                "not support: read the samples with LitData, and pack an iterable of them"
            )
    return leaves


def _find_keys(src: Path, spec: Mapping[str, Any], keys: tuple[Hashable, ...]) -> Iterator[tuple[Hashable, ...]]:
    """Yield the keys that lead to each value in a LitData specification (``TreeSpec``)."""
    if spec["type"] is None:
        yield keys
        return
    if spec["type"] not in _NODES:  # For other types, LitData would import a module that the specification names.
        raise PackError(
            f"samples of {src} contain a {spec['type']}: only dictionaries, lists and tuples can be packed. Read the "
            "samples with LitData, and pack an iterable of them"
        )
    children = spec["children_spec"]
    names = parse_json(spec["context"]) if spec["type"] == "builtins.dict" else range(len(children))
    for name, child in zip(names, children, strict=True):
        yield from _find_keys(src, child, (*keys, name))


def find_labels(leaves: Sequence[_Leaf]) -> list[str]:
    """List the name of the label, if any: a plain value with a label's name, or the second value of (image, label)."""
    found = [leaf.name for leaf in leaves if leaf.name in _LABELS and leaf.kind in PLAIN]
    if [leaf.keys for leaf in leaves] == [(0,), (1,)] and leaves[0].kind in CONTENTS and leaves[1].kind == "int":
        found = [leaves[1].name]
    return sorted(found, key=_LABELS.index)[:1] if len(found) > 1 else found


def _find_paths(leaves: Iterable[_Leaf]) -> set[tuple[Hashable, ...]]:
    return {leaf.keys[:length] for leaf in leaves for length in range(1, len(leaf.keys) + 1)}


def _leave_out(value: Any, keys: tuple[Hashable, ...], left_out: Collection[tuple[Hashable, ...]]) -> Any:
    if isinstance(value, dict):
        return {
            key: _leave_out(each, (*keys, key), left_out) for key, each in value.items() if (*keys, key) not in left_out
        }
    if isinstance(value, list | tuple):
        return [_leave_out(each, (*keys, i), left_out) for i, each in enumerate(value) if (*keys, i) not in left_out]
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks(IndexedRecords):
    leaves: tuple[_Leaf, ...]

    def open(self) -> _Reader:
        raw = {*CONTENTS, *LISTS} - {"pil"}
        return _Reader(_Items(self.path, self.series, self.leaves, self.unpacked, raw), self.columns, self.leaves)


class _Reader:
    """Reads samples: see :class:`~shardio.packing.sources.records.RecordReader`."""

    def __init__(self, items: _Items, columns: Columns, leaves: Sequence[_Leaf]) -> None:
        self._items, self._columns, self._leaves = items, columns, leaves
        self._plain = [leaf for leaf in leaves if leaf.kind in PLAIN and leaf.name in columns.others]
        self._left_out = _find_paths(leaves) - _find_paths(self._plain)

    def read(self, row: int) -> Mapping[str, bytes]:
        with any_error_is_a_value_error():
            sample = self._items.load(row)
            found = dict[str, bytes]()
            for leaf in self._leaves:
                value = leaf.get(sample)
                if leaf.kind in CONTENTS:
                    content = encode_pixels(value) if leaf.kind == "pil" else bytes(value)
                    found[name_field(self._columns, leaf.name, content, leaf.suffix)] = content
                elif leaf.kind in LISTS:
                    for number, content in enumerate(split_contents(bytes(value))):
                        found[name_field(Columns(), f"{leaf.name}.{number}", content, "jpg")] = content
                elif leaf.kind in ARRAYS and leaf.name in self._columns.others:
                    found[f"{leaf.name.lower()}.npy"] = encode_array(np.asarray(value))
            if self._plain:
                plain = _leave_out(sample, (), self._left_out)
                found["json"] = dump_json(plain if isinstance(plain, dict) else {"0": plain})
        return found


class _Items:
    """Reads items with LitData's ``PyTreeLoader``.

    LitData's ``StreamingDataset`` would replace compressed chunks with decompressed chunks in the dataset's folder.
    """

    def __init__(
        self,
        path: Path,
        series: FileSeries,
        leaves: Sequence[_Leaf],
        unpacked: TemporaryFolder | None,
        raw: Collection[str],
    ) -> None:
        litdata = _import_litdata(path)
        num_leaves = len(leaves)

        class PyTreeLoader(litdata.PyTreeLoader):  # type: ignore[misc, name-defined]  # LitData checks the name of the class.
            def _data_format_to_key(self, data_format: str) -> str:
                kind = data_format.partition(":")[0]  # LitData's method may return the part after the colon.
                return "bytes" if kind in raw else kind

            def deserialize(self, content: bytes | memoryview) -> Any:
                sizes = np.frombuffer(content, "<u4", num_leaves)
                if 4 * num_leaves + int(sizes.sum(dtype=np.int64)) != len(content):
                    raise ValueError(f"its values do not have {len(content)} bytes: create the chunk again")
                return super().deserialize(content)

        self._series, self._loader = series, PyTreeLoader(batch_decode=0)
        self._is_one_value = not leaves[0].keys
        self._paths = [find_folder(path, unpacked, name) / name for name in series.names]
        try:
            litdata.ChunksConfig(str(path), litdata.get_serializers(None), None, self._loader)
        except Exception as error:  # LitData may raise any error for an invalid index.
            let_through(error)
            raise PackError(f"{path / INDEX} is invalid: {describe_error(error)}. Create it again") from error
        # By default, LitData reads whole chunks, because it expects all samples of a chunk to be read in order.
        self._loader.set_mmap_allowed_chunks(set(range(len(series.names))))
        self._loader.set_posix_fast(True, keep=_NUM_MAPPED, willneed=False)

    def load(self, row: int) -> Any:
        number, item = self._series.find(row)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the memory of a tensor is read-only.
            found = self._loader.load_item_from_chunk(row, number, str(self._paths[number]), row - item, 0)
        return found if self._is_one_value or isinstance(found, dict) else dict(enumerate(found))


class LitDataChunks(PackSource):
    """A directory that ``litdata.optimize`` wrote, or one of its splits."""

    what = "LitData chunks"

    def find(self, src: Path) -> Evidence | None:
        return find_index(src, _KIND)

    def scan(self, src: Path, options: PackOptions) -> SourceScan:
        """Scan a directory that ``litdata.optimize`` wrote. Compressed chunks are decompressed into a temporary folder.

        Raises:
            PackError: If the directory holds several splits, a chunk is missing or damaged, or values cannot be packed.
        """
        litdata, index = _import_litdata(src), read_index(src, _KIND)
        with invalid_index_is_an_error(src):
            chunks, leaves = index["chunks"], _find_leaves(src, index["config"])
            columns = choose_columns(
                src,
                [leaf.name for leaf in leaves],
                contents=[leaf.name for leaf in leaves if leaf.kind in CONTENTS],
                labels=find_labels(leaves),
                options=options,
            )
            names, files, unpacked = _find_files(litdata, src, index)
            series = FileSeries.of(names, [chunk["chunk_size"] for chunk in chunks])
            sizes = [
                np.full(chunk["chunk_size"], chunk["chunk_bytes"] // max(chunk["chunk_size"], 1)) for chunk in chunks
            ]
        records = _Chunks(path=src, files=files, series=series, columns=columns, leaves=leaves, unpacked=unpacked)
        values = _read_values(records)
        found = RecordScan(
            records=records,
            sizes=np.concatenate(sizes, dtype=np.int64) if sizes else np.zeros(0, np.int64),
            num_fields=sum(leaf.kind not in PLAIN for leaf in leaves) + 1,
            keys=None if columns.key is None else values[columns.key],
            labels=None if columns.label is None else values[columns.label],
        )
        return scan_records(found, options)


def _find_files(
    litdata: _LitData, src: Path, index: Mapping[str, Any]
) -> tuple[list[str], tuple[SourceFile, ...], TemporaryFolder | None]:
    """Return the names of the decompressed chunks, the dataset's files, and the folder of decompressed chunks."""
    config = index["config"]
    compression: str = config["compression"] or ""
    if litdata.is_in_file_compression(config.get("compression_level")):
        compression = ""
    parts = list[ListedShard]()
    for chunk in index["chunks"]:
        packed = chunk["filename"] if compression else None
        name = chunk["filename"].replace(f".{compression}", "") if compression else chunk["filename"]
        parts.append(ListedShard(name, chunk["chunk_bytes"], packed, may_be_larger=True))

    def find_decompress(part: ListedShard) -> Callable[[bytes], bytes]:
        if compression not in litdata.compressors:
            raise PackError(f"{src} is compressed with {compression!r}, which LitData cannot read: pip install zstd")
        decompress: Callable[[bytes], bytes] = litdata.compressors[compression].decompress
        return decompress

    return [part.name for part in parts], *find_files(src, parts, find_decompress)


def _read_values(records: _Chunks) -> dict[str, list[Any]]:
    wanted = [leaf for leaf in records.leaves if leaf.name in (records.columns.key, records.columns.label)]
    found: dict[str, list[Any]] = {leaf.name: [] for leaf in wanted}
    if not wanted or not records.series.ends:
        return found
    raw = {leaf.kind for leaf in records.leaves} - {leaf.kind for leaf in wanted}
    items = _Items(records.path, records.series, records.leaves, records.unpacked, raw)
    row = 0
    try:
        for row in range(records.series.ends[-1]):
            sample = items.load(row)
            for leaf in wanted:
                found[leaf.name].append(_as_plain(leaf.get(sample)))
    except Exception as error:  # LitData has no error class for damaged samples.
        let_through(error)
        raise PackError(
            f"{records.describe(row)} of {records.path} cannot be read: {describe_error(error)}. Download or create "
            "the chunk again"
        ) from error
    return found


def _as_plain(value: Any) -> Any:
    """Return the number in a zero-dimensional array or tensor, or any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


class _LitData(NamedTuple):
    """The parts of LitData that this module uses."""

    PyTreeLoader: Any
    ChunksConfig: Any
    get_serializers: Callable[[None], Mapping[str, Any]]
    is_in_file_compression: Callable[[Any], bool]
    compressors: Mapping[str, Any]


def _import_litdata(src: Path) -> _LitData:
    with requiring("litdata", src, "install it with --no-deps, as docs/packing.md describes"):
        from litdata.streaming.compression import _COMPRESSORS
        from litdata.streaming.config import ChunksConfig
        from litdata.streaming.framed_zstd import is_in_file_compression
        from litdata.streaming.item_loader import PyTreeLoader
        from litdata.streaming.serializers import _get_serializers
    return _LitData(PyTreeLoader, ChunksConfig, _get_serializers, is_in_file_compression, _COMPRESSORS)
