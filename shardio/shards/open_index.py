"""An open index: what it says of some samples is read when it is asked for.

The file is never mapped: a process that reads a mapping of a file that another process has cut is killed.
"""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.errors import FormatError, StaleIndexError
from shardio.json_text import parse_json
from shardio.sample import ByteRange
from shardio.shards.index import INDEX_FORMAT, IndexHeader, digest_headers
from shardio.shards.parts import PartCache
from shardio.shards.tar import BLOCK
from shardio.storage import LocalFile

PART = 512
"""Samples of which the index is read together."""

HEAD = 4096
"""Bytes read of a file at first; its header usually lies within."""

MAX_HEADER = 2**24
"""Bytes of a header at the most: a thousand fields with the longest names."""

_DTYPES = {"offset": "I64", "size": "I64", "hash": "U64", "key_stop": "I64", "key_bytes": "U8"}


class ShardIndex:
    """An open index.

    Attributes:
        path: The index file.
        header: What it says of the whole shard.
        row: By the name of a field, its number in the index.

    Args:
        path: The index file.
        tar: The shard that it belongs to.
        parts: Keeps what was read; by default a memory of its own.

    Raises:
        FormatError: If the file is not an index.
        StaleIndexError: If it is the index of another tar.
    """

    def __init__(self, path: Path, tar: LocalFile, parts: PartCache | None = None) -> None:
        self.path = path
        self._tar, self._parts = tar, PartCache() if parts is None else parts
        self._file = _open(path)
        try:
            self.header, self._begins, self._num_key_bytes = _read_layout(self._file)
            self.row = {field: i for i, field in enumerate(self.header.fields)}
            self._check()
        except BaseException:  # Ctrl-C as well must not leave it open.
            self.close()
            raise

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        return self.keys(np.array([sample]))[0]

    def keys(self, samples: NDArray[np.int64]) -> list[str]:
        """Return the keys of some samples."""
        return [key.decode(errors="surrogateescape") for key in self.raw_keys(samples)]

    def raw_keys(self, samples: NDArray[np.int64]) -> list[bytes]:
        """Return the keys of some samples, in UTF-8 or in whatever bytes the tar has."""
        keys, number = list[bytes](), -1
        for sample in samples.tolist():
            if sample // PART != number:
                number = sample // PART
                bounds, content = self._keys_part(number)
            place = sample % PART
            keys.append(content[bounds[place] : bounds[place + 1]])
        return keys

    def locate(
        self, samples: NDArray[np.int64], fields: tuple[str, ...]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
        """Return where fields of samples lie in the tar.

        Args:
            samples: int64 [n], the samples' places in the shard.
            fields: F names of fields.

        Returns:
            The first byte of each content and the one behind its last, both int64 [n, F] and -1 where a sample lacks
            the field, and its xxh3-64, uint64 [n, F].
        """
        numbers = samples // PART
        if len(samples) and (numbers == numbers[0]).all():
            number = int(numbers[0])
            found = self._places_part(number, fields)[:, :, samples - number * PART]
        else:
            found = np.empty((3, len(fields), len(samples)), np.int64)
            for place, sample in enumerate(samples.tolist()):
                found[:, :, place] = self._places_part(sample // PART, fields)[:, :, sample % PART]
        starts, stops, hashes = found.transpose(0, 2, 1)
        return starts, stops, hashes.view(np.uint64)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _places_part(self, number: int, fields: tuple[str, ...]) -> NDArray[np.int64]:
        """Return where fields of one part's samples begin and end, and their hashes, int64 [3, F, samples]."""
        name = (self._file.serial, number, fields)
        part: NDArray[np.int64] | None = self._parts.find(name)
        if part is None:
            part = self._read_places(number * PART, min((number + 1) * PART, self.header.num_samples), fields)
            self._parts.add(name, part, part.nbytes)
        return part

    def _read_places(self, first: int, stop: int, fields: tuple[str, ...]) -> NDArray[np.int64]:
        part = np.full((3, len(fields), stop - first), -1, np.int64)
        for column, row in enumerate(map(self.row.get, fields)):
            if row is not None:
                begin = row * self.header.num_samples
                for place, name in enumerate(("offset", "size", "hash")):
                    part[place, column] = self._read_integers(name, begin + first, begin + stop)
        offset, size, _ = part
        present = offset >= 0
        is_outside = (offset < BLOCK) | (offset > self._tar.size - size)
        if np.any(present != (size >= 0)) or np.any(present & is_outside):
            raise FormatError(f"the index {self.path} points outside of its tar: {self._remedy}")
        size[present] += offset[present]
        return part

    def _keys_part(self, number: int) -> tuple[list[int], bytes]:
        """Return the keys of one part's samples end to end, and where each begins, and the last one ends."""
        name = (self._file.serial, number)
        part: tuple[list[int], bytes] | None = self._parts.find(name)
        if part is None:
            first, stop = number * PART, min((number + 1) * PART, self.header.num_samples)
            begin = self._read_integers("key_stop", first - 1, first) if first else np.zeros(1, np.int64)
            bounds = np.concatenate([begin, self._read_integers("key_stop", first, stop)])
            if bounds[0] < 0 or np.any(np.diff(bounds) < 0) or bounds[-1] > self._num_key_bytes:
                raise FormatError(f"the index {self.path} has keys of negative length, or outside of it")
            begins = self._begins["key_bytes"] + bounds
            content = _read(self._file, int(begins[0]), int(begins[-1]))
            part = (bounds - bounds[0]).tolist(), content
            self._parts.add(name, part, len(content) + 40 * len(bounds))
        return part

    def _read_integers(self, name: str, first: int, stop: int) -> NDArray[np.int64]:
        begin = self._begins[name]
        return np.frombuffer(_read(self._file, begin + 8 * first, begin + 8 * stop), "<i8")

    @property
    def _remedy(self) -> str:
        return f"{self._tar.path} has changed since; delete {self.path} to have it made again"

    def _check(self) -> None:
        """Check what is said of the first and the last samples; what lies between is checked when it is first read."""
        header = self.header
        if self._tar.size != header.num_bytes:
            raise StaleIndexError(
                f"the index {self.path} was made for a tar of {header.num_bytes} bytes, "
                f"and the tar has {self._tar.size}: {self._remedy}"
            )
        if not 0 <= header.num_samples <= self._tar.size // BLOCK or self._num_key_bytes > self._tar.size:
            raise FormatError(
                f"the index {self.path} has {header.num_samples} samples with keys of {self._num_key_bytes} bytes, "
                f"more than {self._tar.path} can hold in {self._tar.size} bytes: {self._remedy}"
            )
        columns = list[NDArray[np.int64]]()
        if header.num_samples:
            last = header.num_samples - 1
            starts, _, _ = self.locate(np.array([0, last]), header.fields)
            columns = [starts[0], starts[1]]
            self._keys_part(0)
            ends, _ = self._keys_part(last // PART)
            begin = self._read_integers("key_stop", last - last % PART - 1, last - last % PART) if last >= PART else [0]
            if begin[0] + ends[-1] != self._num_key_bytes:
                raise FormatError(f"the keys of the index {self.path} do not end where their bytes do")
        if digest_headers(self._tar, columns) != header.header_digest:
            raise StaleIndexError(f"the index {self.path} was made for a tar with other members: {self._remedy}")


def read_header(path: Path) -> IndexHeader:
    """Return what an index says of its whole shard, whether its tar is there or not.

    Raises:
        FormatError: If the file is not an index.
    """
    with closing(_open(path)) as file:
        return _read_layout(file)[0]


def _open(path: Path) -> LocalFile:
    try:
        return LocalFile(path)
    except (FileNotFoundError, IsADirectoryError) as error:  # Other errors of the system say nothing of the file.
        raise FormatError(f"the index {path} is no file: {error}") from error


def _read(file: LocalFile, start: int, stop: int) -> bytes:
    try:
        return file.read(ByteRange(start=start, stop=stop))
    except (EOFError, OSError) as error:
        raise FormatError(f"the index {file.path} cannot be read: {error}") from error


def _read_layout(file: LocalFile) -> tuple[IndexHeader, dict[str, int], int]:
    """Read the head of a safetensors file: 8 bytes with the length of a JSON header, the header.

    Returns:
        The index's own header, where in the file each tensor begins, and the bytes of all keys.
    """
    content = _read(file, 0, min(HEAD, file.size))
    try:
        data_start = 8 + int.from_bytes(content[:8], "little")
        if data_start > min(file.size, MAX_HEADER):
            raise ValueError(f"its header ends at byte {data_start}, the file at {file.size}, and none at {MAX_HEADER}")
        if data_start > len(content):
            content += _read(file, len(content), data_start)
        layout = parse_json(content[8:data_start])
        values = parse_json(layout["__metadata__"]["shardio"])
        if values["format"] != INDEX_FORMAT:  # First: another format may have other values.
            raise FormatError(
                f"the index {file.path} has format {values['format']}, and this shardio reads {INDEX_FORMAT}: use the "
                "version of shardio that wrote it, or delete the index and have it made again"
            )
        header = IndexHeader(**{**values, "fields": tuple(values["fields"])})
        _check_header(header)
        begins = {name: data_start + _check_tensor(name, layout[name], header) for name in _DTYPES}
        for name in _DTYPES:
            if data_start + layout[name]["data_offsets"][1] > file.size:
                raise ValueError(f"tensor {name} ends behind the file")
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{file.path} is not an index of shardio, or it is damaged: {error!r}") from error
    return header, begins, layout["key_bytes"]["shape"][0]


def _check_header(header: IndexHeader) -> None:
    """Raise ValueError or TypeError if a header has values that no index has."""
    for field in header.fields:
        if not isinstance(field, str):
            raise TypeError(f"fields are {header.fields}")
        field.encode(errors="surrogateescape")  # As it is compared with the tar.
    if not all(type(number) is int for number in (header.num_samples, header.num_bytes)):
        raise TypeError(f"it says {header.num_samples!r} samples and {header.num_bytes!r} bytes")
    if not isinstance(header.digest, str):
        raise TypeError(f"the digest is {header.digest!r}")


def _check_tensor(name: str, tensor: Any, header: IndexHeader) -> int:
    """Return where a tensor's data begins; raise ValueError or TypeError if it is not as the header says."""
    (start, stop), shape, dtype = tensor["data_offsets"], tensor["shape"], tensor["dtype"]
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise TypeError(f"tensor {name} has the shape {shape} and bytes {start} to {stop}")
    expected = {
        "key_stop": [header.num_samples],
        "key_bytes": shape[:1],
    }.get(name, [len(header.fields), header.num_samples])
    num_bytes = (1 if dtype == "U8" else 8) * math.prod(shape)
    if dtype != _DTYPES[name] or shape != expected or stop - start != num_bytes:
        raise ValueError(f"tensor {name} has dtype {dtype}, shape {shape} and bytes {start} to {stop}")
    return int(start)
