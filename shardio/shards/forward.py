"""A file object that lets tarfile read a tar only forwards, and only in bounded pieces.

tarfile trusts the sizes in headers. It reads an extended header of any length at once, calls itself recursively for
consecutive extended headers, and seeks forwards or backwards by any number of bytes.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, cast

import xxhash

from shardio.storage import PIECE, StoredFile, read_pieces

MAX_HEADER_BYTES = 2**20
"""The maximum size of a header in bytes. A pax header holds a file's name and attributes, and is much smaller."""

MAX_HEADER_READS = 128
"""The maximum number of reads of one member's headers. A member has one or two extended headers of two reads each."""

HEADERS_PIECE = 2**16
"""The number of bytes to read at a time if contents are skipped."""


class ForwardFile:
    """A tar for tarfile to read from.

    Attributes:
        size: The file's size in bytes.
        position: The offset of the next byte to read.
        last_read: What tarfile read last: the plain header of the current member.

    Args:
        file: The open tar.
        digest: Updated with all bytes, including skipped ones. Without a digest, contents are not read.
    """

    def __init__(self, file: StoredFile, digest: xxhash.xxh3_128 | None = None) -> None:
        self._file, self._digest = file, digest
        self.size = file.size
        self.last_read = b""
        self._num_reads = 0
        self._piece = memoryview(b"")  # Bytes from `position` on that were already read.
        self._start_at(0)

    def open(self) -> tarfile.TarFile:
        """Return a TarFile that reads this file.

        Raises:
            tarfile.TarError: If the first header is damaged. Iterating over the TarFile raises it for later headers.
        """
        return tarfile.open(fileobj=cast(BinaryIO, self), mode="r:")

    def read(self, num_bytes: int) -> bytes:
        """Read a header or a part of one. Called by tarfile."""
        self._num_reads += 1
        if self._num_reads > MAX_HEADER_READS:
            raise tarfile.ReadError(f"the headers of one member take more than {MAX_HEADER_READS} reads")
        if not 1 <= num_bytes <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header has {num_bytes} bytes, expected 1 to {MAX_HEADER_BYTES}")
        stop = min(self.position + num_bytes, self.size)
        parts = list[bytes]()
        while self.position < stop:
            parts.append(bytes(self.read_content(stop - self.position)))
        self.last_read = b"".join(parts)
        return self.last_read

    def read_content(self, max_bytes: int) -> memoryview:
        """Return the next bytes: from 1 to ``max_bytes`` of them, or none at the end of the file.

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
        """Prepare for the headers of the next member."""
        self._num_reads = 0

    def seek(self, position: int) -> int:
        """Read or skip bytes up to an offset. Called by tarfile."""
        if not self.position <= position <= self.size:
            raise tarfile.ReadError(
                f"the next header should be at byte {position}, outside bytes {self.position} to {self.size}"
            )
        if self._digest is None and position - self.position > len(self._piece):
            self._start_at(position)
        while self.position < position:
            self.read_content(position - self.position)
        return self.position

    def tell(self) -> int:
        """Return the offset of the next byte to read. Called by tarfile."""
        return self.position

    def _start_at(self, position: int) -> None:
        self.position = position
        num_bytes = HEADERS_PIECE if self._digest is None else PIECE
        self._pieces: Iterator[memoryview] = read_pieces(self._file, position, num_bytes)
        self._piece = memoryview(b"")
