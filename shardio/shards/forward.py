"""How tarfile is given a tar: a file that is read forwards only, and in bounded pieces.

tarfile believes what a header says of sizes. It reads an extended header of any length at once, calls itself for each
extended header that follows another, and skips or goes back by any number of bytes.
"""

from __future__ import annotations

import tarfile
from typing import BinaryIO, cast

import xxhash

MAX_HEADER_BYTES = 2**20
"""Bytes read at once of a header; a pax header holds names and attributes of a file, which fit many times."""

MAX_HEADER_READS = 128
"""Reads of one member's headers. Each extended header takes two, and a member has one or two of them."""

PIECE = 2**20
"""Bytes of content that are held in memory at a time."""


class ForwardFile:
    """A tar for tarfile to read from.

    Attributes:
        size: The file's size in bytes.
        position: Where it is read next.

    Args:
        file: The open tar.
        digest: Is given all bytes, also those that are skipped; without it nothing is read that need not be.
    """

    def __init__(self, file: BinaryIO, digest: xxhash.xxh3_128 | None = None) -> None:
        self._file, self._digest = file, digest
        self.size = file.seek(0, 2)
        self.position = file.seek(0)
        self._num_reads = 0

    def open(self) -> tarfile.TarFile:
        """Return a tar that reads from here.

        Raises:
            tarfile.TarError: If its first header is damaged; reading on raises it for the others.
        """
        return tarfile.open(fileobj=cast(BinaryIO, self), mode="r:")

    def read(self, num_bytes: int) -> bytes:
        """Read a header, or a part of one (tarfile calls this)."""
        self._num_reads += 1
        if self._num_reads > MAX_HEADER_READS:
            raise tarfile.ReadError(f"more than {MAX_HEADER_READS} blocks of headers belong to one member")
        if not 1 <= num_bytes <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {num_bytes} bytes, not of 1 to {MAX_HEADER_BYTES}")
        return self._read(num_bytes)

    def read_content(self, num_bytes: int) -> bytes:
        """Read a part of a member's content."""
        return self._read(num_bytes)

    def end_member(self) -> None:
        """Say that the next member's headers follow."""
        self._num_reads = 0

    def seek(self, position: int) -> int:
        """Read on up to a position (tarfile calls this)."""
        if not self.position <= position <= self.size:
            raise tarfile.ReadError(
                f"the next header is said to lie at byte {position}, and the file has {self.size} bytes"
            )
        if self._digest is None:
            self.position = self._file.seek(position)
        while self.position < position and self._read(min(PIECE, position - self.position)):
            pass
        return self.position

    def tell(self) -> int:
        """Return where it is read next (tarfile calls this)."""
        return self.position

    def _read(self, num_bytes: int) -> bytes:
        content = self._file.read(num_bytes)
        self.position += len(content)
        if self._digest is not None:
            self._digest.update(content)
        return content
