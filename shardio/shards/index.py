"""Read an index file: the offset, size and hash of each field of each sample in one shard.

An index is a safetensors file (https://github.com/huggingface/safetensors) next to the tar. For F fields and n samples,
it contains these little-endian arrays:

    offset      int64  [F, n]   offset of the content in the tar; -1 if the sample lacks the field
    size        int64  [F, n]   size of the content in bytes; -1 if the sample lacks the field
    hash        uint64 [F, n]   xxh3-64 of the content; 0 if the sample lacks the field
    key_stop    int64  [n]      the end of each key in key_bytes
    key_bytes   uint8  [...]    the keys in UTF-8, end to end

The metadata has only one key, ``shardio``, because safetensors writes several keys in random order. The key's value is
a canonical JSON object (see :class:`IndexHeader`).

Samples are in the order of their first members. In tars that shardio packs, the members of a sample are adjacent. In
other tars, a sample may be *scattered*, with members of other samples between its members. Indexes of packed tars have
format 1. Indexes of other tars have format 2, which records the number of scattered samples. Early versions of shardio
wrote format 1 for all tars, and treated each run of adjacent members as a sample.

The file is not memory-mapped: if another process truncated it, reading the mapping would kill this process.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.shards.tar import Ints
from shardio.storage import Location, make_version
from shardio.values import parse_json

INDEX_FORMAT = 1
SCATTERED_FORMAT = 2
INDEX_SUFFIX = ".idx"

DENSE = 4
"""Entries are read in one piece if the piece has at most this many entries for each entry that is needed."""

AHEAD = 512
"""The number of neighboring samples whose entries are fetched together if the index is fetched in parts."""

HEAD = 4096
"""The number of bytes to read first. These bytes usually contain the whole header."""

MAX_HEADER = 2**24
"""The maximum size of a header in bytes, which is enough for a thousand fields with the longest names."""

_REBUILD = "Rebuild it with shardio repair, or download it again"

_DTYPES = {"offset": "I64", "size": "I64", "hash": "U64", "key_stop": "I64", "key_bytes": "U8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexHeader:
    """The metadata of an index, which describes its shard.

    Attributes:
        format: The version of the index format.
        fields: The names of the fields, sorted.
        num_samples: The number of samples in the shard.
        num_bytes: The size of the tar.
        digest: xxh3-128 of the tar, in hexadecimal.
        header_digest: xxh3-64 of the tar headers of the first and the last sample, in hexadecimal. When an index is
            opened, this digest and the tar's size show whether the tar is the one that was indexed.
        version: The tar's version in its store if the tar was indexed on first use. None for a packed shard, because
            the shard may be copied and equal input must give equal indexes.
        compression: ``gzip`` if the tar is compressed: the offsets, the size and the digests then refer to the
            decompressed tar. None for an uncompressed tar.
        num_scattered: The number of scattered samples in format 2, or None in format 1.
    """

    format: int
    fields: tuple[str, ...]
    num_samples: int
    num_bytes: int
    digest: str
    header_digest: str
    version: str | None = None
    compression: str | None = None
    num_scattered: int | None = None


def find_scattered(starts: Ints) -> NDArray[np.bool_]:
    """Return which samples of a tar are scattered, that is, have members of other samples between their members.

    Args:
        starts: int64 [F, n], the offset of each field's content in the tar, or negative if the sample lacks the field.

    Returns:
        bool [n].
    """
    fields, samples = np.nonzero(starts >= 0)
    in_tar_order = samples[np.argsort(starts[fields, samples], kind="stable")]
    runs = in_tar_order[np.diff(in_tar_order, prepend=-1) != 0]
    found: NDArray[np.bool_] = np.bincount(runs, minlength=starts.shape[1]) > 1
    return found


def index_location(tar: Location) -> Location:
    """Return the location of a tar's index next to the tar."""
    return tar.folder / (tar.name + INDEX_SUFFIX)


class IndexFile:
    """An open index file: its header, and its tensors, which are read in parts.

    Raises:
        FormatError: If the file does not exist, is not an index, or is damaged.
    """

    def __init__(self, location: Location) -> None:
        try:
            self._file = location.open(whole=True)
        except (FileNotFoundError, IsADirectoryError) as error:  # Other errors do not mean that the index is damaged.
            raise FormatError(
                f"the index {location} cannot be opened: {error}. Copy the index there, or rebuild it from its tar "
                "(shardio repair). If shardio did not pack the tar, open the dataset again: shardio then creates a new "
                "index"
            ) from error
        try:
            self.header, self._begins, self.num_key_bytes = self._read_layout()
        except BaseException as error:  # Even Ctrl-C must not leave the file open.
            if isinstance(error, FormatError):
                self.discard()
            self.close()
            raise

    def discard(self) -> bool:
        return self._file.discard(0, self._file.size)

    def close(self) -> None:
        self._file.close()

    @property
    def is_fetched_in_parts(self) -> bool:
        return self._file.is_fetched_in_parts

    @property
    def size(self) -> int:
        return self._file.size

    def read_integers(self, name: str, first: int, stop: int) -> Ints:
        begin = self._begins[name]
        return np.frombuffer(self._read(begin + 8 * first, begin + 8 * stop), "<i8")

    def read_entries(self, field_indices: Sequence[int], samples: Ints) -> Ints:
        """Return the offsets, sizes and hashes of the given fields of the given samples, int64 [3, F, n]."""
        columns = [8 * i * self.header.num_samples for i in field_indices]
        begins = [self._begins[name] + column for name in ("offset", "size", "hash") for column in columns]
        return self._read_rows(begins, samples).reshape(3, len(columns), len(samples))

    def read_keys_of(self, samples: Ints, remedy: str) -> list[bytes]:
        """Return the keys of samples."""
        # The first key starts at 0, which is not stored.
        starts, stops = self._read_rows([self._begins["key_stop"] - 8, self._begins["key_stop"]], samples)
        starts = np.where(samples > 0, starts, 0)
        is_wrong = (starts < 0) | (stops < starts) | (stops > self.num_key_bytes)
        is_wrong |= (samples == self.header.num_samples - 1) & (stops != self.num_key_bytes)
        if is_wrong.any():
            raise self._damaged_keys(remedy)
        begin = self._begins["key_bytes"]
        try:
            return self._file.read_many(starts + begin, stops + begin)
        except EOFError as error:
            raise self._unreadable(error) from error

    def prefetch(self, groups: Ints, field_indices: Sequence[int]) -> None:
        """Fetch the keys, and the entries of some fields, for groups of ``AHEAD`` samples. The groups are sorted."""
        num_samples = self.header.num_samples
        runs = np.split(groups, np.flatnonzero(np.diff(groups) > 1) + 1)
        bounds = [(int(run[0]) * AHEAD, min((int(run[-1]) + 1) * AHEAD, num_samples)) for run in runs]
        columns = [(self._begins["key_stop"], 0)]
        columns += [(self._begins[name], i * num_samples) for name in ("offset", "size", "hash") for i in field_indices]
        # The range of keys is a guess, because their bounds have not been fetched.
        keys, mean = self._begins["key_bytes"], self.num_key_bytes / num_samples
        self._file.prefetch(
            [(begin + 8 * (row + first), begin + 8 * (row + stop)) for begin, row in columns for first, stop in bounds]
            + [(keys + int(mean * first), keys + int(mean * stop)) for first, stop in bounds]
        )

    def read_all_keys(self, remedy: str = _REBUILD) -> KeyColumn:
        bounds = np.zeros(self.header.num_samples + 1, np.int64)
        bounds[1:] = self.read_integers("key_stop", 0, self.header.num_samples)
        if (bounds[1:] < bounds[:-1]).any() or bounds[-1] != self.num_key_bytes:
            raise self._damaged_keys(remedy)
        begin = self._begins["key_bytes"]
        return KeyColumn(bounds=bounds, content=self._read(begin, begin + self.num_key_bytes))

    def read_all_entries(self) -> Ints:
        """Return the offset, the size and the hash of each field of each sample, int64 [3, F, n]."""
        shape = len(self.header.fields), self.header.num_samples
        columns = [self.read_integers(name, 0, shape[0] * shape[1]) for name in ("offset", "size", "hash")]
        return np.stack(columns).reshape(3, *shape)

    def check_size(self) -> None:
        header = self.header
        num_integers = (3 * len(header.fields) + 1) * header.num_samples
        if (expected := min(self._begins.values()) + 8 * num_integers + self.num_key_bytes) != self._file.size:
            raise FormatError(
                f"the index {self._file.location} is damaged: it has {self._file.size} bytes, expected {expected}. "
                f"{_REBUILD}"
            )

    def _read_rows(self, begins: Sequence[int], rows: Ints) -> Ints:
        """Return the integers in some rows of the columns that begin at ``begins``, int64 [columns, n]."""
        if not len(rows) or not begins:
            return np.empty((len(begins), len(rows)), np.int64)
        first, last = int(rows.min()), int(rows.max())
        if last - first < DENSE * len(rows):
            pieces = [self._read(begin + 8 * first, begin + 8 * (last + 1)) for begin in begins]
            return np.stack([np.frombuffer(piece, "<i8") for piece in pieces])[:, rows - first]
        try:
            offsets = (8 * rows).tolist()
            starts = [begin + offset for begin in begins for offset in offsets]
            return self._file.read_integers(starts).reshape(len(begins), -1)
        except EOFError as error:
            raise self._unreadable(error) from error

    def _read(self, start: int, stop: int) -> bytes:
        try:
            return self._file.read(start, stop)
        except EOFError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: EOFError) -> FormatError:
        # An OSError, for example from a full cache disk, does not mean damage.
        return FormatError(f"the index {self._file.location} cannot be read: {error}")

    def _damaged_keys(self, remedy: str) -> FormatError:
        return FormatError(
            f"the index {self._file.location} is damaged: keys have negative lengths, or lengths that do not add up to "
            f"the size of key_bytes. {remedy}"
        )

    def _read_layout(self) -> tuple[IndexHeader, dict[str, int], int]:
        """Return the index's own metadata, the offset of each tensor in the file, and the number of bytes of all keys.

        A safetensors file starts with the length of its JSON header in 8 bytes, followed by the header.
        """
        file = self._file
        content = self._read(0, min(HEAD, file.size))
        try:
            data_start = 8 + int.from_bytes(content[:8], "little")
            if data_start > min(file.size, MAX_HEADER):
                raise ValueError(
                    f"its header ends at byte {data_start}, but the file has {file.size} bytes, and a header has "
                    f"at most {MAX_HEADER}"
                )
            if data_start > len(content):
                content += self._read(len(content), data_start)
            layout = parse_json(content[8:data_start])
            metadata = layout["__metadata__"]["shardio"]
            if not isinstance(metadata, str):
                raise TypeError(f"its metadata must be a string, got {type(metadata).__name__}")
            values = parse_json(metadata)
            if values["format"] not in (INDEX_FORMAT, SCATTERED_FORMAT):  # Check the format first.
                raise FormatError(
                    f"the index {file.location} has format {values['format']}, but this version of shardio reads "
                    f"{INDEX_FORMAT} and {SCATTERED_FORMAT}: use the version that wrote it, or pack the dataset again. "
                    "If shardio did not pack the tar, delete the index instead"
                )
            header = make_header(values)
            begins = {name: data_start + _check_tensor(name, layout[name], header) for name in _DTYPES}
            for name in _DTYPES:
                if data_start + layout[name]["data_offsets"][1] > file.size:
                    raise ValueError(f"tensor {name} extends beyond the end of the file")
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"{file.location} is damaged, or is not a shardio index ({error!r}). Download it again, or rebuild it "
                "(shardio repair; if shardio did not pack the tar, delete the index)"
            ) from error
        return header, begins, layout["key_bytes"]["shape"][0]


def make_header(values: dict[str, Any]) -> IndexHeader:
    """Return the metadata of an index, given its JSON values.

    Raises:
        TypeError or ValueError: If the values are invalid.
    """
    mtime_ns, inode = values.pop("mtime_ns", None), values.pop("inode", None)
    if mtime_ns is not None and inode is not None:  # Early versions of shardio wrote these values.
        values["version"] = make_version(values["num_bytes"], mtime_ns, inode)
    header = IndexHeader(**{**values, "fields": tuple(values["fields"])})
    for field in header.fields:
        if not isinstance(field, str):
            raise TypeError(f"fields must be strings, got {header.fields}")
        field.encode(errors="surrogateescape")  # Raise a ValueError here rather than later in Comparison.
    if not all(type(number) is int for number in (header.num_samples, header.num_bytes)):
        got = f"{header.num_samples!r} and {header.num_bytes!r}"
        raise TypeError(f"num_samples and num_bytes must be integers, got {got}")
    if not 0 <= header.num_bytes < 2**63:
        raise ValueError(f"num_bytes is {header.num_bytes}")
    if (header.format == SCATTERED_FORMAT) != (type(header.num_scattered) is int):
        raise TypeError(f"num_scattered {header.num_scattered!r} does not fit an index of format {header.format}")
    if not isinstance(header.digest, str):
        raise TypeError(f"the digest must be a string, got {header.digest!r}")
    return header


def _check_tensor(name: str, tensor: Any, header: IndexHeader) -> int:
    (start, stop), shape, dtype = tensor["data_offsets"], tensor["shape"], tensor["dtype"]
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise TypeError(f"tensor {name} has the shape {shape} and bytes {start} to {stop}")
    expected = {
        "key_stop": [header.num_samples],
        "key_bytes": shape[:1] or [0],  # Any number of bytes in one dimension is valid.
    }.get(name, [len(header.fields), header.num_samples])
    num_bytes = (1 if dtype == "U8" else 8) * math.prod(shape)
    if dtype != _DTYPES[name] or shape != expected or stop - start != num_bytes:
        raise ValueError(f"tensor {name} has dtype {dtype}, shape {shape} and bytes {start} to {stop}")
    return int(start)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyColumn:
    """The keys of an index's n samples.

    Attributes:
        bounds: int64 [n + 1], the offsets in ``content`` at which the keys start and stop.
        content: The concatenated keys.
    """

    bounds: Ints
    content: bytes

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the keys occupy in memory."""
        return self.bounds.nbytes + len(self.content)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, sample: int) -> bytes:
        return self.content[self.bounds[sample] : self.bounds[sample + 1]]

    def text(self, sample: int) -> str:
        """Return a sample's key as text."""
        return decode_key(self[sample])

    def hash_all(self) -> NDArray[np.uint64]:
        """Return the hash of each key, uint64 [n]: see :func:`hash_key`."""
        bounds = pairwise(self.bounds.tolist())
        return np.fromiter(
            (xxhash.xxh3_64_intdigest(self.content[start:stop]) for start, stop in bounds), np.uint64, len(self)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexColumns:
    """The content of an index of n samples and F fields.

    Attributes:
        header: The index's metadata.
        keys: The keys.
        starts: int64 [F, n], the offset of each field's content in the tar, or negative if the sample lacks the field.
        sizes: int64 [F, n], the size of each field's content in bytes.
        hashes: uint64 [F, n], the xxh3-64 hash of each field's content.
    """

    header: IndexHeader
    keys: KeyColumn
    starts: Ints
    sizes: Ints
    hashes: NDArray[np.uint64]

    def fields_of(self, sample: int) -> Iterator[tuple[str, int, int]]:
        """Yield the name, the offset and the size of each field that a sample has."""
        starts, sizes = self.starts[:, sample].tolist(), self.sizes[:, sample].tolist()
        for field, start, size in zip(self.header.fields, starts, sizes, strict=True):
            if start >= 0:
                yield field, start, size


def decode_key(key: bytes) -> str:
    """Return a key as text."""
    return key.decode(errors="surrogateescape")


def hash_key(key: str) -> int:
    """Return the xxh3-64 hash of a key."""
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape"))


def find_equal(hashes: NDArray[np.uint64]) -> Ints:
    """Return the sorted places of the hashes that occur more than once, int64 [k]."""
    _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    return np.flatnonzero(counts[inverse] > 1)


def find_repeated(keys: KeyColumn) -> dict[str, list[int]]:
    """Return each key that several samples have, with the indices of these samples."""
    found = defaultdict[str, list[int]](list)
    for sample in find_equal(keys.hash_all()).tolist():
        found[keys.text(sample)].append(sample)
    return {key: samples for key, samples in found.items() if len(samples) > 1}


def read_header(location: Location) -> IndexHeader:
    """Return the metadata of an index. The tar need not exist.

    Raises:
        FormatError: If the file is not an index, or is damaged.
    """
    with closing(IndexFile(location)) as file:
        return file.header


def read_hashes(location: Location, field: str) -> NDArray[np.uint64]:
    """Return the hashes of a field in all samples of an index, uint64 [n]; an empty array if the index lacks the field.

    Raises:
        FormatError: If the file is not an index, or is damaged.
    """
    with closing(IndexFile(location)) as file:
        fields, num_samples = file.header.fields, file.header.num_samples
        if field not in fields:
            return np.empty(0, np.uint64)
        first = fields.index(field) * num_samples
        return file.read_integers("hash", first, first + num_samples).view(np.uint64)


def read_keys(location: Location) -> KeyColumn:
    """Read the keys of an index.

    Raises:
        FormatError: If the file is not an index, or is damaged.
    """
    with closing(IndexFile(location)) as file:
        return file.read_all_keys()


def read_columns(location: Location) -> IndexColumns:
    """Read a whole index, without comparing it with its tar.

    Raises:
        FormatError: If the file is not an index, or is damaged.
    """
    with closing(IndexFile(location)) as file:
        keys = file.read_all_keys()
        file.check_size()
        starts, sizes, hashes = file.read_all_entries()
    return IndexColumns(header=file.header, keys=keys, starts=starts, sizes=sizes, hashes=hashes.view(np.uint64))
