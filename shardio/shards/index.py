"""Read an index: the offset, size and hash of each field of each sample in one shard.

An index is a safetensors file (https://github.com/huggingface/safetensors) next to the tar. For F fields and n samples,
it contains these little-endian arrays:

    offset      int64  [F, n]   offset of the content in the tar; -1 if the sample lacks the field
    size        int64  [F, n]   size of the content in bytes; -1 if the sample lacks the field
    hash        uint64 [F, n]   xxh3-64 of the content; 0 if the sample lacks the field
    key_stop    int64  [n]      the end of each key in key_bytes
    key_bytes   uint8  [...]    the keys in UTF-8, end to end

The metadata has one key, ``shardio``, with a canonical JSON object (see :class:`IndexHeader`), because safetensors
writes several keys in random order.

Samples are in the order of their first members. In tars that shardio packs, the members of a sample are adjacent. In
other tars, a sample may be *scattered*, with members of other samples between its members. Indexes of packed tars have
format 1. Indexes of other tars have format 2, which records the number of scattered samples. Early versions of shardio
wrote format 1 for all tars, and treated each run of adjacent members as a sample.

The file is not memory-mapped: if another process truncated it, reading the mapping would kill this process.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, StaleIndexError
from shardio.shards.tar import BLOCK, Ints
from shardio.storage import Location, StoredFile, make_version
from shardio.values import parse_json

INDEX_FORMAT = 1
SCATTERED_FORMAT = 2
INDEX_SUFFIX = ".idx"

MAX_BYTES = 64 * 2**20
"""The maximum memory in bytes for the parts of indexes that one reader keeps. The default order of a dataset with two
fields and 20,000 samples in each shard needs less memory."""

PART = 512
"""The number of samples whose entries are read together."""

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
    """Return which samples of a tar are scattered, with members of other samples between their members.

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


class TarHeaders(Protocol):
    """The interface of a tar that an index needs. Stored files and newly written tars implement it."""

    @property
    def location(self) -> Location:
        """The tar's location."""

    @property
    def size(self) -> int:
        """The tar's size in bytes."""

    def read_many(self, starts: Ints, stops: Ints) -> list[bytes]:
        """Return blocks, which are the headers of the members of the first or the last sample."""


def digest_headers(tar: TarHeaders, starts: Iterable[Ints]) -> str:
    """Hash the plain tar headers of samples, which are the blocks before their contents.

    Args:
        tar: The tar.
        starts: For each sample, the offset of each field's content, int64 [F], or -1 if the sample lacks the field.

    Returns:
        xxh3-64 in hexadecimal.
    """
    found = np.concatenate([fields[fields >= BLOCK] for fields in starts] or [np.empty(0, np.int64)])
    digest = xxhash.xxh3_64()
    for header in tar.read_many(found - BLOCK, found):
        digest.update(header)
    return digest.hexdigest()


class PartCache:
    """A cache of parts of indexes in memory, which drops the least recently used parts first.

    The cache has no lock, because a forked child could inherit a held lock. Each operation on the dictionary is atomic,
    and two threads that need the same part at the same time both read the part.

    Args:
        max_bytes: The maximum memory of all parts in bytes. Each part counts as much as the largest part.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._largest = 1
        self._parts: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, name: Hashable) -> Any:
        """Return a part, or None if the part is not in the cache."""
        part = self._parts.get(name)
        if part is not None:
            with suppress(KeyError):  # Another thread has dropped the part.
                self._parts.move_to_end(name)
        return part

    def add(self, name: Hashable, part: Any, num_bytes: int) -> None:
        """Add a part, and drop the least recently used parts that no longer fit."""
        self._largest = max(self._largest, num_bytes)
        self._parts[name] = part
        with suppress(KeyError):
            while len(self._parts) > max(1, self._max_bytes // self._largest):
                self._parts.popitem(last=False)

    def clear(self) -> None:
        """Drop all parts."""
        self._parts.clear()


class ShardIndex:
    """An open index.

    Attributes:
        location: The location of the index.
        header: The index's metadata.
        field_indices: The place of each field in the index, by the field's name.

    Args:
        location: The location of the index.
        tar: The shard's open tar.
        parts: A cache for the parts that are read; by default, a new cache.

    Raises:
        FormatError: If the file is not an index, or is damaged.
        StaleIndexError: If the file is the index of another tar.
    """

    def __init__(self, location: Location, tar: StoredFile, parts: PartCache | None = None) -> None:
        self.location = location
        self._tar, self._parts = tar, PartCache() if parts is None else parts
        self._identity = object()  # Distinguishes this index's parts in a cache that several indexes share.
        self._file = _IndexFile(location)
        self.header = self._file.header
        self.field_indices = {field: i for i, field in enumerate(self.header.fields)}
        try:
            self._check()
        except BaseException as error:  # Even Ctrl-C must not leave the file open.
            if isinstance(error, FormatError):
                self.discard()
            self.close()
            raise

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        return self.keys(np.array([sample]))[0]

    def keys(self, samples: Ints) -> list[str]:
        """Return the keys of samples."""
        return list(map(decode_key, self.raw_keys(samples)))

    def raw_keys(self, samples: Ints) -> list[bytes]:
        """Return the keys of samples as bytes from the tar, usually in UTF-8."""
        keys, current = list[bytes](), -1
        for sample in samples.tolist():
            part, row = divmod(sample, PART)
            if part != current:
                current = part
                bounds, content = self._keys_part(part)
            keys.append(content[bounds[row] : bounds[row + 1]])
        return keys

    def locate(self, samples: Ints, fields: tuple[str, ...]) -> tuple[Ints, Ints, NDArray[np.uint64]]:
        """Return the byte ranges and the hashes of fields of samples.

        Args:
            samples: int64 [n], indices in the shard.
            fields: F names of fields.

        Returns:
            The start and the stop of each content in the tar, both int64 [n, F], or -1 where a sample lacks the field;
            and the xxh3-64 of each content, uint64 [n, F].
        """
        parts = samples // PART
        if len(samples) and (parts == parts[0]).all():
            part = int(parts[0])
            found = self._ranges_part(part, fields)[:, :, samples - part * PART]
        else:
            found = np.empty((3, len(fields), len(samples)), np.int64)
            for row, sample in enumerate(samples.tolist()):
                found[:, :, row] = self._ranges_part(sample // PART, fields)[:, :, sample % PART]
        starts, stops, hashes = found.transpose(0, 2, 1)
        return starts, stops, hashes.view(np.uint64)

    def discard(self) -> bool:
        """Remove the file's bytes from the cache. Return whether another read may return different bytes."""
        return self._file.discard()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _ranges_part(self, part: int, fields: tuple[str, ...]) -> Ints:
        name = (self._identity, part, fields)
        found: Ints | None = self._parts.find(name)
        if found is None:
            found = self._read_ranges(part * PART, min((part + 1) * PART, self.header.num_samples), fields)
            self._parts.add(name, found, found.nbytes)
        return found

    def _read_ranges(self, first: int, stop: int, fields: tuple[str, ...]) -> Ints:
        found = np.full((3, len(fields), stop - first), -1, np.int64)
        for column, field_index in enumerate(map(self.field_indices.get, fields)):
            if field_index is not None:
                begin = field_index * self.header.num_samples
                for i, name in enumerate(("offset", "size", "hash")):
                    found[i, column] = self._file.read_integers(name, begin + first, begin + stop)
        offset, size, present = found[0], found[1], found[0] >= 0
        is_outside = (offset < BLOCK) | (offset > self._tar.size - size)
        if np.any(present != (size >= 0)) or np.any(present & is_outside):
            raise FormatError(f"the index {self.location} is damaged: it points outside its tar. {self._remedy}")
        size[present] += offset[present]
        return found

    def _keys_part(self, part: int) -> tuple[list[int], bytes]:
        """Return the n + 1 bounds of the keys of a part's n samples, and the concatenated keys."""
        name = (self._identity, part)
        found: tuple[list[int], bytes] | None = self._parts.find(name)
        if found is None:
            first, stop = part * PART, min((part + 1) * PART, self.header.num_samples)
            bounds = self._file.read_key_bounds(first, stop, self._remedy)
            content = self._file.read_keys(int(bounds[0]), int(bounds[-1]))
            found = (bounds - bounds[0]).tolist(), content
            self._parts.add(name, found, len(content) + 40 * len(bounds))
        return found

    @property
    def _remedy(self) -> str:
        return (
            "Download the index and its tar again, or pack the dataset again. If shardio did not pack this tar, delete "
            f"{self.location} instead"
        )

    def _check(self) -> None:
        """Check the first and the last samples. The other samples are checked when they are first read."""
        header = self.header
        if self._tar.size != header.num_bytes:
            raise StaleIndexError(
                f"the index {self.location} was created for a tar of {header.num_bytes} bytes, "
                f"but {self._tar.location} has changed: it now has {self._tar.size} bytes. {self._remedy}"
            )
        num_key_bytes = self._file.num_key_bytes
        if not 0 <= header.num_samples <= self._tar.size // BLOCK or num_key_bytes > self._tar.size:
            raise FormatError(
                f"the index {self.location} has {header.num_samples} samples with keys of {num_key_bytes} bytes, "
                f"more than {self._tar.location} can hold in {self._tar.size} bytes. {self._remedy}"
            )
        first_and_last = list[Ints]()
        if header.num_samples:
            last = header.num_samples - 1
            starts, _, _ = self.locate(np.array([0, last]), header.fields)
            first_and_last = [starts[0], starts[1]]
            self._keys_part(0)
            self._keys_part(last // PART)
        # For a compressed tar, the version was compared instead: reading its last header would decompress all of it.
        if header.compression is None and not self._fits_headers(first_and_last):
            raise StaleIndexError(
                f"the index {self.location} was created for a tar with different members: {self._tar.location} has "
                f"changed. {self._remedy}"
            )

    def _fits_headers(self, starts: Sequence[Ints]) -> bool:
        """Return whether the headers before ``starts`` are those that were indexed. If they differ, read them again."""
        if digest_headers(self._tar, starts) == self.header.header_digest:
            return True
        headers = [start for each in starts for start in each.tolist() if start >= BLOCK]
        can_differ = [self._tar.discard(start - BLOCK, start) for start in headers]
        return any(can_differ) and digest_headers(self._tar, starts) == self.header.header_digest


class _IndexFile:
    """The open file of an index: its header, and its tensors, which are read in parts.

    Raises:
        FormatError: If the file does not exist, is not an index, or is damaged.
    """

    def __init__(self, location: Location) -> None:
        try:
            self._file = location.open(whole=True)
        except (FileNotFoundError, IsADirectoryError) as error:  # Other errors do not mean that the index is damaged.
            raise FormatError(
                f"the index {location} cannot be opened: {error}. Copy the index there, or pack the dataset again. If "
                "shardio did not pack the tar, open the dataset again: shardio then creates a new index"
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

    def read_integers(self, name: str, first: int, stop: int, dtype: str = "<i8") -> NDArray[Any]:
        begin = self._begins[name]
        return np.frombuffer(self._read(begin + 8 * first, begin + 8 * stop), dtype)

    def read_key_bounds(self, first: int, stop: int, remedy: str) -> Ints:
        """Return the offsets in the keys' bytes at which samples' keys start and stop, int64 [stop - first + 1]."""
        bounds = np.zeros(stop - first + 1, np.int64)
        bounds[0 if first else 1 :] = self.read_integers("key_stop", max(0, first - 1), stop)
        is_last = stop == self.header.num_samples
        ends_right = bounds[-1] == self.num_key_bytes if is_last else bounds[-1] <= self.num_key_bytes
        if bounds[0] < 0 or np.any(bounds[1:] < bounds[:-1]) or not ends_right:
            raise FormatError(
                f"the index {self._file.location} is damaged: keys have negative lengths, or lengths that do not "
                f"add up to the size of key_bytes. {remedy}"
            )
        return bounds

    def read_keys(self, start: int, stop: int) -> bytes:
        return self._read(self._begins["key_bytes"] + start, self._begins["key_bytes"] + stop)

    def read_all_keys(self) -> KeyColumn:
        bounds = self.read_key_bounds(0, self.header.num_samples, _REBUILD)
        return KeyColumn(bounds=bounds, content=self.read_keys(0, self.num_key_bytes))

    def check_size(self) -> None:
        header = self.header
        num_integers = (3 * len(header.fields) + 1) * header.num_samples
        if (expected := min(self._begins.values()) + 8 * num_integers + self.num_key_bytes) != self._file.size:
            raise FormatError(
                f"the index {self._file.location} is damaged: it has {self._file.size} bytes, expected {expected}. "
                f"{_REBUILD}"
            )

    def _read(self, start: int, stop: int) -> bytes:
        try:
            return self._file.read(start, stop)
        except EOFError as error:  # An OSError, such as a full cache disk, does not mean damage.
            raise FormatError(f"the index {self._file.location} cannot be read: {error}") from error

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
            if values["format"] not in (INDEX_FORMAT, SCATTERED_FORMAT):  # Checked first: formats differ.
                raise FormatError(
                    f"the index {file.location} has format {values['format']}, but this version of shardio reads "
                    f"{INDEX_FORMAT} and {SCATTERED_FORMAT}: use the version that wrote it, or pack the dataset again. "
                    "If shardio did not pack the tar, delete the index instead"
                )
            header = _make_header(values)
            begins = {name: data_start + _check_tensor(name, layout[name], header) for name in _DTYPES}
            for name in _DTYPES:
                if data_start + layout[name]["data_offsets"][1] > file.size:
                    raise ValueError(f"tensor {name} extends beyond the end of the file")
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"{file.location} is damaged, or is not a shardio index ({error!r}). Download it or pack the dataset "
                "again. If shardio did not pack the tar, move this file elsewhere: shardio then creates a new index"
            ) from error
        return header, begins, layout["key_bytes"]["shape"][0]


def _make_header(values: dict[str, Any]) -> IndexHeader:
    mtime_ns, inode = values.pop("mtime_ns", None), values.pop("inode", None)
    if mtime_ns is not None and inode is not None:  # Early versions of shardio wrote these values.
        values["version"] = make_version(values["num_bytes"], mtime_ns, inode)
    header = IndexHeader(**{**values, "fields": tuple(values["fields"])})
    for field in header.fields:
        if not isinstance(field, str):
            raise TypeError(f"fields must be strings, got {header.fields}")
        field.encode(errors="surrogateescape")  # Raise a ValueError here rather than later, in Comparison.
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
        hashes: uint64 [F, n], the xxh3-64 of each field's content.
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
    """Return the xxh3-64 of a key."""
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
    with closing(_IndexFile(location)) as file:
        return file.header


def read_keys(location: Location) -> KeyColumn:
    """Read the keys of an index.

    Raises:
        FormatError: If the file is not an index, or is damaged.
    """
    with closing(_IndexFile(location)) as file:
        return file.read_all_keys()


def read_columns(location: Location) -> IndexColumns:
    """Read a whole index, without comparing it with its tar.

    Raises:
        FormatError: If the file is not an index, or is damaged.
    """
    with closing(_IndexFile(location)) as file:
        keys = file.read_all_keys()
        file.check_size()
        shape = len(file.header.fields), file.header.num_samples
        starts, sizes, hashes = (
            file.read_integers(name, 0, shape[0] * shape[1], dtype).reshape(shape)
            for name, dtype in (("offset", "<i8"), ("size", "<i8"), ("hash", "<u8"))
        )
    return IndexColumns(header=file.header, keys=keys, starts=starts, sizes=sizes, hashes=hashes)
