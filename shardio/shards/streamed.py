"""The samples of a tar that is read as a stream: once, forwards, without an index."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import BinaryIO, cast

import xxhash

from shardio.errors import FormatError
from shardio.shards.forward import ForwardReader
from shardio.shards.index_columns import hash_key
from shardio.shards.names import group_members, is_added_by_macos, split_name
from shardio.shards.tar import BLOCK
from shardio.shards.tar_scan import TAR_ERRORS, check_member, data_after_end, read_headers, refuse_without_content

_GZIP = b"\x1f\x8b"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
"""The first bytes of compressed files."""

_PIECE = 2**18
"""How many bytes to decompress at a time."""


class IncompleteTarError(FormatError):
    """A tar ends too early or is damaged. Another transfer may be right. The message is only the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSample:
    """A sample of a stream.

    Attributes:
        key: Its key.
        offset: The offset of its first field's content in the (decompressed) tar.
        contents: The contents of the requested fields that it has.
        digest: The xxh3-64 of the names and sizes of its fields and those of all samples before it in the tar.
    """

    key: str
    offset: int
    contents: dict[str, bytes]
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    offset: int
    size: int
    content: bytes | None  # None if the field was not requested.


class StreamedTar:
    """A tar that is read forwards: its samples are those that an index of it would have, in the same order.

    An index also gathers the members of scattered samples. Here, such a sample is an error when its second part comes,
    after the first was yielded.

    Args:
        name: The tar's name, for messages.
        read: Returns the next bytes of the stream, or none at its end.
        fields: The fields whose contents are kept.
    """

    def __init__(self, name: str, read: Callable[[], bytes], fields: Collection[str]) -> None:
        self._name, self._fields = name, frozenset(fields)
        self._reader = ForwardReader(_read_pieces(name, read))

    @property
    def num_bytes(self) -> int:
        """How many bytes of the (decompressed) tar were read."""
        return self._reader.position

    def samples(self) -> Iterator[StreamedSample]:
        """Yield the samples. A sample is yielded when all of its fields have been read.

        Raises:
            IncompleteTarError: If the tar is damaged or has no end.
            FormatError: If it is not a tar of samples, or the members of a sample are not adjacent.
        """
        digest, field_sets = 0, dict[frozenset[str], int]()
        fields_of = dict[int, int]()  # The number of a sample's set of fields, by the hash of its key.
        for key, members in group_members(self._name, self._members()):
            fields = field_sets.setdefault(frozenset(members), len(field_sets))
            if fields_of.setdefault(hash_key(key), fields) != fields:
                raise self._scattered(key, min(member.offset for member in members.values()))
            for field, member in members.items():
                header = f"{key}.{field}\0{member.size}".encode(errors="surrogateescape")
                digest = xxhash.xxh3_64_intdigest(header, seed=digest)
            yield StreamedSample(
                key=key,
                offset=min(member.offset for member in members.values()),
                contents={name: each.content for name, each in members.items() if each.content is not None},
                digest=digest,
            )

    def _scattered(self, key: str, offset: int) -> FormatError:
        return FormatError(
            f"the members of sample {key} of {self._name} are not adjacent: some follow at byte {offset}, after other "
            "samples, so a stream would deliver parts of samples. Index the tar (shardio index) and read it with "
            "ShardDataset, which gathers them, or make it again with tar --sort=name"
        )

    def _members(self) -> Iterator[tuple[tuple[str, str], _Member]]:
        reader, stop = self._reader, 0
        try:
            for info, next_header in read_headers(reader):
                refuse_without_content(self._name, info)
                name = None if is_added_by_macos(info.name) else split_name(info.name)
                if info.isreg():
                    check_member(self._name, info, next_header, reader.size)
                if info.isreg() and name is not None:
                    content = self._read_content(info.size, is_kept=name[1] in self._fields)
                    yield name, _Member(offset=info.offset_data, size=info.size, content=content)
                stop = next_header
            self._read_end(stop)
        except TAR_ERRORS as error:
            raise IncompleteTarError(f"it is not a complete tar: {error}") from error

    def _read_content(self, num_bytes: int, *, is_kept: bool) -> bytes | None:
        parts, num_left = list[bytes](), num_bytes
        while num_left:
            piece = self._reader.read_content(num_left)
            if not piece:
                raise EOFError("the stream ends in the middle of a member")
            num_left -= len(piece)
            if is_kept:
                parts.append(bytes(piece))
        return b"".join(parts) if is_kept else None

    def _read_end(self, stop: int) -> None:
        """Read the rest of the stream, which must be zeros. tarfile has read one block from ``stop`` on."""
        reader = self._reader
        if reader.position != stop + BLOCK or reader.last_read != bytes(BLOCK):
            raise EOFError(f"neither a member nor the end mark is at byte {stop}")
        while piece := reader.read_content(_PIECE):
            if rest := bytes(piece).lstrip(b"\0"):
                raise data_after_end(self._name, reader.position - len(rest))


def _read_pieces(name: str, read: Callable[[], bytes]) -> Iterator[memoryview]:
    """Yield the content of a stream, decompressed if it is a gzip file."""
    first = b""
    while len(first) < BLOCK and (piece := read()):
        first += piece
    for start, program in _OTHERS.items():
        if first.startswith(start):
            raise FormatError(
                f"{name} is compressed with {program}, which streams of tars cannot be: decompress it in the command, "
                f"as in 'pipe:cat x.tar.{program} | {program} -dc'"
            )
    if not first.startswith(_GZIP):
        while first:
            yield memoryview(first)
            first = read()
        return
    raw = io.BufferedReader(_RawStream(first, read), _PIECE)
    with closing(gzip.GzipFile(fileobj=cast(BinaryIO, raw), mode="rb")) as file:
        try:
            while piece := file.read(_PIECE):
                yield memoryview(piece)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise IncompleteTarError(f"it is not a complete gzip file: {error}") from error


class _RawStream(io.RawIOBase):
    """A stream after its first bytes were read."""

    def __init__(self, first: bytes, read: Callable[[], bytes]) -> None:
        self._left, self._read = first, read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # not any buffer
        left = self._left or self._read()
        num_read = min(len(buffer), len(left))
        buffer[:num_read], self._left = left[:num_read], left[num_read:]
        return num_read
