"""A tar as tarfile reads it: forwards only, and in bounded pieces.

tarfile believes the sizes in headers. It reads an extended header of any length at once, calls itself for each
extended header that follows another, and skips or goes back by any number of bytes.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, cast

import xxhash

from shardio.storage import PIECE, StoredFile, read_pieces

MAX_HEADER_BYTES = 2**20
"""Bytes of a header that are read at once: a pax header holds names and attributes of a file, and needs far less."""

MAX_HEADER_READS = 128
"""Reads of one member's headers. Each extended header takes two, and a member has one or two of them."""

HEADERS_PIECE = 2**16
"""Bytes that are read at once where contents are skipped."""


class ForwardFile:
    """A tar for tarfile to read from.

    Attributes:
        size: The file's size in bytes.
        position: The byte that is read next.

    Args:
        file: The open tar.
        digest: Takes all bytes, including those that are skipped. Without it, contents are not read.
    """

    def __init__(self, file: StoredFile, digest: xxhash.xxh3_128 | None = None) -> None:
        self._file, self._digest = file, digest
        self.size = file.size
        self._num_reads = 0
        self._piece = memoryview(b"")  # What was read and lies at `position`.
        self._start_at(0)

    def open(self) -> tarfile.TarFile:
        """Return a tar that reads from here.

        Raises:
            tarfile.TarError: If its first header is damaged. Reading on raises it for the other headers.
        """
        return tarfile.open(fileobj=cast(BinaryIO, self), mode="r:")

    def read(self, num_bytes: int) -> bytes:
        """Read a header, or a part of one (tarfile calls this)."""
        self._num_reads += 1
        if self._num_reads > MAX_HEADER_READS:
            raise tarfile.ReadError(f"more than {MAX_HEADER_READS} blocks of headers belong to one member")
        if not 1 <= num_bytes <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {num_bytes} bytes, not of 1 to {MAX_HEADER_BYTES}")
        stop = min(self.position + num_bytes, self.size)
        parts = list[bytes]()
        while self.position < stop:
            parts.append(bytes(self.read_content(stop - self.position)))
        return b"".join(parts)

    def read_content(self, max_bytes: int) -> memoryview:
        """Return at least one of the next bytes, and at most so many; none at the end of the file.

        The next call overwrites them.
        """
        if not self._piece:
            self._piece = next(self._pieces, self._piece)
            if self._digest is not None:
                self._digest.update(self._piece)
        content, self._piece = self._piece[:max_bytes], self._piece[max_bytes:]
        self.position += len(content)
        return content

    def end_member(self) -> None:
        """Expect the headers of the next member."""
        self._num_reads = 0

    def seek(self, position: int) -> int:
        """Read on up to a position (tarfile calls this)."""
        if not self.position <= position <= self.size:
            raise tarfile.ReadError(f"the next header should be at byte {position}, but the file has {self.size} bytes")
        if self._digest is None and position - self.position > len(self._piece):
            self._start_at(position)
        while self.position < position:
            self.read_content(position - self.position)
        return self.position

    def tell(self) -> int:
        """Return the byte that is read next (tarfile calls this)."""
        return self.position

    def _start_at(self, position: int) -> None:
        self.position = position
        num_bytes = HEADERS_PIECE if self._digest is None else PIECE
        self._pieces: Iterator[memoryview] = read_pieces(self._file, position, num_bytes)
        self._piece = memoryview(b"")
