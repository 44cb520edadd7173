"""The index: where every field of every sample of one shard lies.

A safetensors file (https://github.com/huggingface/safetensors) beside the tar, memory-mapped. F fields,
n samples, little-endian:

    offset      int64  [F, n]   first byte of the content in the tar; -1 where a sample lacks the field
    size        int64  [F, n]   bytes of the content; -1 likewise
    hash        uint64 [F, n]   xxh3-64 of the content; 0 likewise
    key_stop    int64  [n]      where each key ends in key_bytes
    key_bytes   uint8  [...]    the keys in UTF-8, end to end

Its metadata has one key, ``shardio``, with a canonical JSON object (see :class:`IndexHeader`): several keys
would be written in random order.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, StaleIndexError
from shardio.sample import ByteRange
from shardio.shards.tar import BLOCK
from shardio.storage import LocalFile, write_whole

INDEX_FORMAT = 1
INDEX_SUFFIX = ".idx"

MAX_FIELDS = 1024
"""More different fields than this in one shard are taken for a tar that is not in WebDataset's naming."""

_DTYPES = {"offset": "I64", "size": "I64", "hash": "U64", "key_stop": "I64", "key_bytes": "U8"}
_NUMPY_DTYPES = {"I64": "<i8", "U64": "<u8", "U8": "u1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredField:
    """Where the content of one field lies in the tar, and its xxh3-64."""

    offset: int
    size: int
    hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """Where the fields of one sample lie."""

    key: str
    fields: Mapping[str, StoredField]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """What an index says of its shard.

    Attributes:
        format: The index format's version.
        fields: The names of the fields, sorted.
        num_samples: The samples of the shard.
        num_bytes: The size of the tar.
        digest: xxh3-128 of the tar, in hexadecimal.
        header_digest: xxh3-64 of the tar headers of the first and the last sample, in hexadecimal: with the
            tar's size it shows, at opening, whether the tar is the one that was indexed.
    """

    format: int
    fields: tuple[str, ...]
    num_samples: int
    num_bytes: int
    digest: str
    header_digest: str


def index_path(tar: Path) -> Path:
    """Return where the index of a tar lies: beside it."""
    return tar.with_name(tar.name + INDEX_SUFFIX)


def write_index(path: Path, tar: LocalFile, samples: Sequence[StoredSample], digest: str) -> None:
    """Write the index of a tar.

    Args:
        path: Where to write it.
        tar: The finished tar.
        samples: What lies in the tar, in its order.
        digest: xxh3-128 of the tar, in hexadecimal.
    """
    fields = tuple(sorted({field for sample in samples for field in sample.fields}))
    if len(fields) > MAX_FIELDS:
        raise FormatError(
            f"{tar.path} has {len(fields)} different fields, and {MAX_FIELDS} are the most that an index holds: "
            "its members are not named key.field as WebDataset wants it"
        )
    row = {field: i for i, field in enumerate(fields)}
    offset = np.full((len(fields), len(samples)), -1, dtype="<i8")
    size = offset.copy()
    content_hash = np.zeros(offset.shape, dtype="<u8")
    for column, sample in enumerate(samples):
        for name, field in sample.fields.items():
            offset[row[name], column], size[row[name], column] = field.offset, field.size
            content_hash[row[name], column] = field.hash
    keys = [sample.key.encode(errors="surrogateescape") for sample in samples]
    header = IndexHeader(
        format=INDEX_FORMAT,
        fields=fields,
        num_samples=len(samples),
        num_bytes=tar.size,
        digest=digest,
        header_digest=_digest_headers(tar, offset),
    )
    tensors = {
        "offset": offset,
        "size": size,
        "hash": content_hash,
        "key_stop": np.cumsum([len(key) for key in keys], dtype="<i8"),
        "key_bytes": np.frombuffer(b"".join(keys), dtype=np.uint8),
    }
    metadata = {"shardio": json.dumps(asdict(header), sort_keys=True, separators=(",", ":"))}
    with write_whole(path) as file:
        file.write(safetensors.numpy.save(tensors, metadata))


class ShardIndex:
    """An open index. It holds one mapping, and so one descriptor, until it is closed.

    Args:
        path: The index file.
        tar: The shard that it belongs to.

    Raises:
        FormatError: If the file is not an index.
        StaleIndexError: If it is the index of another tar.
    """

    def __init__(self, path: Path, tar: LocalFile) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except (
            FileNotFoundError,
            IsADirectoryError,
            ValueError,
        ) as error:  # Other errors of the system say nothing of the file.
            raise FormatError(f"the index {path} is no file, or empty: {error}") from error
        try:
            self.header, tensors = _parse(path, self._map)
            self.offset, self.size, self.hash = (tensors[name] for name in ("offset", "size", "hash"))
            self._key_stop, self._key_bytes = tensors["key_stop"], tensors["key_bytes"]
            self._check(tar)
        except BaseException:
            self.close()
            raise
        self._row = {field: i for i, field in enumerate(self.header.fields)}

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        start = self._key_stop[sample - 1] if sample else 0
        return self._key_bytes[start : self._key_stop[sample]].tobytes().decode(errors="surrogateescape")

    def keys(self, samples: NDArray[np.int64]) -> list[str]:
        """Return the keys of some samples."""
        if not len(samples):
            return []
        stops = self._key_stop[samples]
        starts = np.where(samples > 0, self._key_stop[samples - 1], 0)
        first = int(starts.min())
        content = self._key_bytes[first : stops.max()].tobytes()
        places = zip((starts - first).tolist(), (stops - first).tolist(), strict=True)
        return [content[start:stop].decode(errors="surrogateescape") for start, stop in places]

    def locate(self, samples: NDArray[np.int64], fields: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where fields of samples begin and end in the tar, both int64 [n, F]; -1 where one is lacking."""
        starts = np.full((len(samples), len(fields)), -1, np.int64)
        stops = starts.copy()
        for column, row in enumerate(map(self._row.get, fields)):
            if row is not None:
                starts[:, column] = self.offset[row, samples]
                stops[:, column] = starts[:, column] + self.size[row, samples]
        return starts, stops

    def where(self, sample: int, field: str) -> ByteRange | None:
        """Return where a field of a sample lies in the tar, or None if the sample has no such field."""
        row = self._row.get(field)
        if row is None:
            return None
        start = int(self.offset[row, sample])
        return None if start < 0 else ByteRange(start=start, stop=start + int(self.size[row, sample]))

    def close(self) -> None:
        """Give the mapping back; arrays that are still in use keep it until they go."""
        self.offset = self.size = self._key_stop = np.empty(0, np.int64)
        self.hash = np.empty(0, np.uint64)
        self._key_bytes = np.empty(0, np.uint8)
        del self._map

    def _check(self, tar: LocalFile) -> None:
        remedy = f"{tar.path} has changed since; delete {self.path} to have it made again"
        if tar.size != self.header.num_bytes:
            raise StaleIndexError(
                f"the index {self.path} was made for a tar of {self.header.num_bytes} bytes, "
                f"and the tar has {tar.size}: {remedy}"
            )
        shape = (len(self.header.fields), self.header.num_samples)
        if self.offset.shape != shape or self.size.shape != shape or self.hash.shape != shape:
            raise FormatError(f"the index {self.path} holds arrays of {self.offset.shape}, but its header says {shape}")
        present = self.offset >= 0
        if np.any(present != (self.size >= 0)) or np.any(self.offset[present] > tar.size - self.size[present]):
            raise FormatError(f"the index {self.path} points outside of its tar: {remedy}")
        if len(self._key_stop) != self.header.num_samples or np.any(np.diff(self._key_stop, prepend=0) < 0):
            raise FormatError(f"the index {self.path} has keys of negative length, or not one for each sample")
        if self._key_stop[-1:].tolist() not in ([], [len(self._key_bytes)]):
            raise FormatError(f"the keys of the index {self.path} do not end where their bytes do")
        if _digest_headers(tar, self.offset) != self.header.header_digest:
            raise StaleIndexError(f"the index {self.path} was made for a tar with other members: {remedy}")


def _digest_headers(tar: LocalFile, offset: NDArray[np.int64]) -> str:
    """Hash the blocks before the contents of the first and the last sample: their plain tar headers."""
    digest = xxhash.xxh3_64()
    for column in offset[:, :1], offset[:, -1:]:
        for start in column[column >= BLOCK].tolist():
            digest.update(tar.read(ByteRange(start=start - BLOCK, stop=start)))
    return digest.hexdigest()


def _parse(path: Path, content: mmap.mmap) -> tuple[IndexHeader, dict[str, NDArray[Any]]]:
    """Read a safetensors file: 8 bytes with the length of a JSON header, the header, the tensors."""
    try:
        data_start = 8 + int.from_bytes(content[:8], "little")
        layout = json.loads(content[8:data_start])
        values = json.loads(layout["__metadata__"]["shardio"])
        header = IndexHeader(**{**values, "fields": tuple(values["fields"])})
        if not all(isinstance(field, str) for field in header.fields):
            raise TypeError(f"fields are {header.fields}")
        tensors = {}
        for name, dtype in _DTYPES.items():
            start, stop = layout[name]["data_offsets"]
            if layout[name]["dtype"] != dtype or start > stop or data_start + stop > len(content):
                raise ValueError(f"tensor {name} has dtype {layout[name]['dtype']} and bytes {start} to {stop}")
            flat = np.frombuffer(content, np.uint8)[data_start + start : data_start + stop]
            tensors[name] = flat.view(_NUMPY_DTYPES[dtype]).reshape(layout[name]["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is not an index of shardio, or it is damaged: {error!r}") from error
    if header.format != INDEX_FORMAT:
        raise FormatError(f"the index {path} has format {header.format}, and this shardio reads {INDEX_FORMAT}")
    return header, tensors
