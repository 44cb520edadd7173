"""A file object that lets tarfile read a tar only forwards, and only in bounded pieces.

tarfile trusts the sizes in headers. It reads an extended header of any length at once, calls itself recursively for
consecutive extended headers, and seeks forwards or backwards by any number of bytes.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, cast

import xxhash

from shardio.shards.tar import BLOCK
from shardio.storage import StoredFile, read_pieces

MAX_HEADER_BYTES = 2**20
"""The maximum size of a header in bytes. A pax header holds a file's name and attributes, and is much smaller."""

MAX_HEADER_READS = 128
"""The maximum number of reads of one member's headers. A member has one or two extended headers of two reads each."""

MAX_RECORDS = 1000
"""The maximum number of records of a pax header, and of different keywords of all global pax headers. tarfile copies
those for each member."""

MAX_DIGITS = 256
"""The maximum number of digits in a row in a pax header, as the time of tarfile's regular expressions grows with the
square of it (CVE-2024-6232)."""

HEADERS_PIECE = 2**16
"""The number of bytes to read at a time if contents are skipped."""

_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENDED = (*_PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)

_IS_DIGIT = bytes(48 <= byte < 58 for byte in range(256))
"""1 for each digit, and 0 for each other byte."""


UNKNOWN_SIZE = 2**63 - 1
"""The size of a stream, which is known only at its end. No tar is as large."""


class ForwardReader:
    """A tar for tarfile to read from. All of its bytes are read in order.

    Attributes:
        size: The tar's size in bytes, or UNKNOWN_SIZE.
        position: The offset of the next byte to read.
        last_read: What tarfile read last: the plain header of the current member.

    Args:
        pieces: The tar's content. Each piece may overwrite the last.
        size: The tar's size in bytes.
    """

    def __init__(self, pieces: Iterator[memoryview], size: int = UNKNOWN_SIZE) -> None:
        self.size = size
        self.position = 0
        self.last_read = b""
        self._num_reads = 0
        self._extended = b""  # The type of the extended header that tarfile reads next; empty before other reads.
        self._global_keywords = set[bytes]()
        self._pieces = pieces
        self._piece = memoryview(b"")  # Bytes from `position` on that were already read.

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
        while self.position < stop and (content := self.read_content(stop - self.position)):
            parts.append(bytes(content))
        self.last_read = b"".join(parts)
        self._check(num_bytes)
        return self.last_read

    def _check(self, num_bytes: int) -> None:
        """Raise ReadError if what tarfile read last is a pax header that it would read in quadratic time."""
        kind, self._extended = self._extended, b""
        if not kind and num_bytes == BLOCK:
            kind = self.last_read[156:157]
            self._extended = kind if kind in _EXTENDED else b""
        elif kind in _PAX:
            keywords = _find_keywords(self.last_read)
            if kind == tarfile.XGLTYPE:
                self._global_keywords.update(keywords)
            if max(len(keywords), len(self._global_keywords)) > MAX_RECORDS:
                raise tarfile.ReadError(f"pax headers have more than {MAX_RECORDS} records")

    def read_content(self, max_bytes: int) -> memoryview:
        """Return the next bytes: from 1 to ``max_bytes`` of them, or none at the end of the file.

        The next call overwrites them.
        """
        if not self._piece:
            self._piece = next(self._pieces, self._piece)
        content, self._piece = self._piece[:max_bytes], self._piece[max_bytes:]
        self.position += len(content)
        return content

    def end_member(self) -> None:
        """Prepare for the headers of the next member."""
        self._num_reads, self._extended = 0, b""

    def seek(self, position: int) -> int:
        """Read bytes up to an offset, or up to the end of the tar. Called by tarfile."""
        if not self.position <= position <= self.size:
            raise tarfile.ReadError(
                f"the next header should be at byte {position}, outside bytes {self.position} to {self.size}"
            )
        while self.position < position and self.read_content(position - self.position):
            pass
        return self.position

    def tell(self) -> int:
        """Return the offset of the next byte to read. Called by tarfile."""
        return self.position


class ForwardFile(ForwardReader):
    """A stored tar for tarfile to read from.

    Args:
        file: The open tar.
        digest: Updated with all bytes, including skipped ones. Without a digest, contents are not read.
    """

    def __init__(self, file: StoredFile, digest: xxhash.xxh3_128 | None = None) -> None:
        self._file, self._digest = file, digest
        super().__init__(self._read_from(0), file.size)

    def seek(self, position: int) -> int:
        """Read or skip bytes up to an offset. Called by tarfile."""
        if self._digest is None and self.position + len(self._piece) < position <= self.size:
            self.position, self._piece = position, memoryview(b"")
            self._pieces = self._read_from(position)
        return super().seek(position)

    def _read_from(self, position: int) -> Iterator[memoryview]:
        for piece in read_pieces(self._file, position, HEADERS_PIECE if self._digest is None else None):
            if self._digest is not None:
                self._digest.update(piece)
            yield piece


def _find_keywords(header: bytes) -> list[bytes]:
    """Return the keywords of the records of a pax header, which may be padded with zeros.

    Old versions of tarfile search in all of the rest if a record lacks the equals sign, and later ones refuse it.

    Raises:
        tarfile.ReadError: If a record is not ``length keyword=value``, or has too many digits in a row.
    """
    if b"\1" * (MAX_DIGITS + 1) in header.translate(_IS_DIGIT):
        raise tarfile.ReadError(f"a pax header has more than {MAX_DIGITS} digits in a row")
    keywords, position = list[bytes](), 0
    while position < len(header) and header[position]:
        space = header.find(b" ", position, position + 20)
        length = header[position:space] if space > 0 else b""
        stop = position + int(length) if length.isdigit() else 0
        equals = header.find(b"=", space, stop)
        if equals <= space + 1 or stop > len(header) or header[stop - 1] != ord("\n"):
            raise tarfile.ReadError(f"a pax header has an invalid record at its byte {position}")
        keywords.append(header[space + 1 : equals])
        position = stop
    return keywords
