"""Tars that gzip compressed (RFC 1952): they are indexed and read as streams. Datasets do not read them.

Reading a member decompresses everything before it. So an index tells what the tar contains, and single samples can be
extracted, but training from such a tar would be slow.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, BinaryIO, cast

import numpy as np
import safetensors.numpy
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, SampleError
from shardio.shards.comparison import describe_offset
from shardio.shards.foreign import TarContents, find_index, has_split_samples, scan_contents, write_where_allowed
from shardio.shards.index_columns import read_columns
from shardio.shards.index_writer import write_index
from shardio.shards.open_index import read_header
from shardio.shards.tar import BLOCK, MAX_MEMBER, TOO_LARGE
from shardio.storage import PIECE, Location, StoredFile, parse_location

GZIP = "gzip"
"""The value of an index's ``compression``."""

_NAME = re.compile(r".+\.(tar\.gz|tgz)", re.IGNORECASE)


def is_compressed(tar: Location) -> bool:
    """Return whether a tar's name is that of a tar that gzip compressed."""
    return _NAME.fullmatch(tar.name) is not None


def find_compressed_index(tar: Location) -> Location | None:
    """Return the index of a compressed tar if the tar has not changed since it was indexed; None otherwise."""
    index = find_index(tar)
    if index is None:
        return None
    header = read_header(index)
    is_current = header.compression == GZIP and header.version == tar.stat().version
    return index if is_current and not has_split_samples(index, header) else None


def make_compressed_index(tar: Location) -> tuple[Location, TarContents]:
    """Create the index of a compressed tar. Return its location, and what the tar contains.

    The tar is decompressed twice: once to find its size, and once to read it. Memory does not grow with its size.

    Raises:
        FormatError: If the file is not a complete tar in a complete gzip file, or cannot be indexed.
        OSError: If the tar cannot be read, or the index cannot be written.
    """
    with closing(DecompressedFile(tar)) as file:
        contents = scan_contents(file)
        file.remember(contents.headers)
        if tar.stat().version != file.version:
            raise FormatError(f"{tar} changed while it was being indexed: index it again when nothing is writing to it")
        with TemporaryDirectory() as folder:
            unmarked = parse_location(Path(folder) / "index")
            write_index(unmarked, file, contents.samples, contents.digest, file.version)
            content = _mark_compressed(unmarked.read_whole())
        index = write_where_allowed(tar, partial(_write, content=content))
    return index, contents


def _write(location: Location, content: bytes) -> None:
    with location.write_whole() as file:
        file.write(content)


class DecompressedFile:
    """A tar that gzip compressed, read as if it were not compressed. Not for several threads.

    Reading forwards continues; reading backwards starts at the beginning of the file again.

    Args:
        location: The location of the compressed tar.
        size: The size of the decompressed tar in bytes; by default, the tar is decompressed once to find it.

    Raises:
        FormatError: If the file is not a complete gzip file.
        OSError: If it cannot be read.
    """

    def __init__(self, location: Location, size: int | None = None) -> None:
        self.location = location
        self._file = location.open()
        self.version = self._file.version
        self._known: Mapping[int, bytes] = {}
        try:
            self._restart()
            self.size = self._measure() if size is None else size
        except BaseException:  # Ctrl-C must not leave the file open either.
            self.close()
            raise

    def remember(self, headers: Mapping[int, bytes]) -> None:
        """Keep blocks, by the offsets where they end, so that reading them again costs nothing."""
        self._known = headers

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the decompressed tar."""
        if stop - start == BLOCK and stop in self._known:
            return self._known[stop]
        content = bytearray()
        while (position := start + len(content)) < stop:  # In pieces: an index may claim more bytes than there are.
            piece = bytearray(min(PIECE, stop - position))
            self.read_into([position], [memoryview(piece)])
            content += piece
        return bytes(content)

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        """Return the contents of many ranges, which are read in the order of their starts."""
        contents = [b""] * len(starts)
        for i in np.argsort(starts, kind="stable").tolist():
            contents[i] = self.read(int(starts[i]), int(stops[i]))
        return contents

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        """Fill each buffer with the bytes that begin at its start position."""
        for start, buffer in zip(starts, buffers, strict=True):
            if start < self._position:
                self._restart()
            skipped = memoryview(bytearray(min(PIECE, start - self._position)))
            while self._position < start:
                self._fill(skipped[: start - self._position])
            self._fill(buffer)

    @property
    def is_local(self) -> bool:
        """Whether the compressed tar is local."""
        return self._file.is_local

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: a compressed tar is read forwards."""

    def discard(self, start: int, stop: int) -> bool:
        """Return False: nothing is cached."""
        return False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _restart(self) -> None:
        stream = io.BufferedReader(_Stream(self._file), PIECE)
        self._stream = gzip.GzipFile(fileobj=cast(BinaryIO, stream), mode="rb")
        self._position = 0

    def _measure(self) -> int:
        buffer = memoryview(bytearray(PIECE))
        while num_read := self._read_some(buffer):
            self._position += num_read
        return self._position

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            num_read = self._read_some(buffer)
            if not num_read:
                raise EOFError(f"{self.location} ends at byte {self._position} of the decompressed tar")
            self._position += num_read
            buffer = buffer[num_read:]

    def _read_some(self, buffer: memoryview) -> int:
        try:
            return self._stream.readinto(buffer)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise FormatError(
                f"{self.location} is not a complete gzip file: {error} (after {self._position} decompressed bytes). "
                "Download or create it again"
            ) from error


class CompressedShard:
    """A compressed tar and its index, to read single samples. A context manager closes it.

    Args:
        tar: The location of the tar.

    Raises:
        FormatError: If the tar has no current index, or two of its samples have the same key.
    """

    def __init__(self, tar: Location) -> None:
        index = find_compressed_index(tar)
        if index is None:
            raise FormatError(f"{tar} has no current index: create one with shardio index {tar}")
        self.columns = read_columns(index)
        self._file = DecompressedFile(tar, self.columns.header.num_bytes)
        self._places = dict[str, int]()
        for sample in range(len(self.columns.keys)):
            key = self.columns.keys.text(sample)
            if (other := self._places.setdefault(key, sample)) != sample:
                self.close()
                raise FormatError(
                    f"two samples of {tar} have the key {key!r}, the {other + 1}th and the {sample + 1}th: a key must "
                    "name one sample"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields, sorted."""
        return self.columns.header.fields

    def sort(self, keys: Sequence[str]) -> list[str]:
        """Return keys in the order in which the tar is decompressed once. Unknown keys come first."""
        return sorted(keys, key=lambda key: self._places.get(key, -1))

    def read(self, key: str, fields: Sequence[str] | None = None) -> dict[str, Any]:
        """Return some fields of a sample, as :meth:`shardio.KeyedShards.read` does.

        Raises:
            KeyError: If no sample has the key.
            SampleError: If the sample is damaged, or a field is too large.
        """
        if (sample := self._places.get(key)) is None:
            raise KeyError(f"no sample has the key {key!r} in {self._file.location}")
        found: dict[str, Any] = {"__key__": key}
        columns = self.columns
        for field_index in np.argsort(columns.starts[:, sample], kind="stable").tolist():
            field, start = self.fields[field_index], int(columns.starts[field_index, sample])
            if start < 0 or (fields is not None and field not in fields):
                continue
            where, num_bytes = describe_offset(self._file, start), int(columns.sizes[field_index, sample])
            if not 0 <= num_bytes <= MAX_MEMBER:
                message = f"field {field!r} of sample {key} in {where} has {num_bytes} bytes, {TOO_LARGE}"
                raise SampleError(message, key=key, where=where)
            try:
                content = self._file.read(start, start + num_bytes)
            except EOFError as error:
                raise SampleError(f"sample {key} cannot be read from {where}: {error}", key=key, where=where) from error
            if xxhash.xxh3_64_intdigest(content) != int(columns.hashes[field_index, sample]):
                message = f"field {field!r} of sample {key} in {where} is damaged: download the tar again"
                raise SampleError(message, key=key, where=where)
            found[field] = content
        return found

    def close(self) -> None:
        """Close the tar."""
        self._file.close()

    def __enter__(self) -> CompressedShard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Stream(io.RawIOBase):
    """A stored file as a stream."""

    def __init__(self, file: StoredFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # not any buffer
        view = memoryview(buffer)[: self._file.size - self._position]
        self._file.read_into([self._position], [view])
        self._position += len(view)
        return len(view)


def _mark_compressed(index: bytes) -> bytes:
    """Return an index with a header that says that its tar is compressed."""
    metadata = json.loads(index[8 : 8 + int.from_bytes(index[:8], "little")])["__metadata__"]
    header = {**json.loads(metadata["shardio"]), "compression": GZIP}
    marked = {"shardio": json.dumps(header, sort_keys=True, separators=(",", ":"))}
    return safetensors.numpy.save(safetensors.numpy.load(index), marked)
