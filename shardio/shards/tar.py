"""The tar layout: plain POSIX tars (IEEE Std 1003.1, "pax Interchange Format"), written and scanned.

Each member is a header of whole 512-byte blocks, its content, and zeros up to the next block; two zero
blocks end the file. Time, owner and mode are constants, so equal input gives equal bytes. A name that does
not fit the plain header gets a pax header before it; the block right before the content is always the
member's own plain header.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from shardio.errors import FormatError

BLOCK = 512
"""The size of a tar block in bytes."""

END = bytes(2 * BLOCK)
"""What ends a tar."""


def make_header(name: str, num_bytes: int) -> bytes:
    """Return the header of a member, one block or, where the name needs a pax header, three or more."""
    info = tarfile.TarInfo(name)
    info.size = num_bytes
    info.mode = 0o644
    return info.tobuf(format=tarfile.PAX_FORMAT)


def make_padding(num_bytes: int) -> bytes:
    """Return the zeros that fill the last block of a content of ``num_bytes``."""
    return bytes(-num_bytes % BLOCK)


def size_in_tar(name: str, num_bytes: int) -> int:
    """Return how many bytes of a tar a member takes: header, content and padding."""
    fits_plain_header = name.isascii() and len(name) <= tarfile.LENGTH_NAME and num_bytes < 8**11
    header = BLOCK if fits_plain_header else len(make_header(name, num_bytes))
    return header + num_bytes + -num_bytes % BLOCK


def header_fits(header: bytes, name: bytes, num_bytes: int) -> bool:
    """Say whether a block can be the plain header of a member.

    Args:
        header: The block.
        name: The member's name; the case of its ASCII letters does not count.
        num_bytes: The size of its content.

    Returns:
        False if the name or the size differs. Names that a plain header may hold shortened or in another encoding fit
        any name.
    """
    if header.startswith(name + b"\0") and header[124:136] == b"%011o\0" % num_bytes:
        return True  # As nearly all of them are.
    if num_bytes < 8**11 and _read_size(header) not in (num_bytes, None):
        return False
    if len(name) > tarfile.LENGTH_NAME or not name.isascii():
        return True
    found = header[: tarfile.LENGTH_NAME].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    return name.lower() in (found.lower(), prefix.lower() + b"/" + found.lower())


def _read_size(header: bytes) -> int | None:
    """Return the size in a header; None if it is not in octal digits."""
    digits = header[124:136].strip(b" \0")
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


def is_header(block: bytes) -> bool:
    """Say whether a block is the header of a member, by its checksum."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def find_name(path: Path, offset: int) -> str | None:
    """Return the name of the member whose content begins at a byte, by all headers before it; None if there is none."""
    try:
        with tarfile.open(path, "r:") as tar:
            for info in tar:
                if info.offset_data >= offset:
                    return info.name if info.offset_data == offset else None
                tar.members = []  # type: ignore[attr-defined]  # tarfile would remember every member
    except tarfile.TarError:
        pass  # What cannot be read as a tar has no member there.
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """A regular file in a tar: its name, content, and the byte where the content begins."""

    name: str
    offset: int
    content: bytes


class TarScan:
    """Reads a tar from end to end, once, and hashes it on the way.

    Attributes:
        num_bytes: The bytes read so far; the tar's size once all members have been seen.
        digest: xxh3-128 of those bytes, in hexadecimal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def members(self) -> Iterator[TarMember]:
        """Yield the regular files in their order.

        Raises:
            FormatError: If the file is not a plain tar, or ends too early.
        """
        with self._path.open("rb") as self._file:
            try:
                # "r|" reads blocks in sequence, so that every byte passes through read() below.
                with tarfile.open(fileobj=cast(BinaryIO, self), mode="r|") as tar:
                    for info in tar:
                        if info.issparse():
                            raise FormatError(
                                f"{self._path} holds {info.name} as a sparse file (at byte {info.offset_data}), whose "
                                "content is not one range of bytes: pack it again without --sparse"
                            )
                        content = tar.extractfile(info) if info.isreg() else None
                        if content is not None:
                            yield TarMember(name=info.name, offset=info.offset_data, content=content.read())
                        tar.members = []  # type: ignore[attr-defined]  # tarfile would remember every member
            except (tarfile.TarError, EOFError) as error:
                raise FormatError(
                    f"{self._path} is not a whole plain tar: {error} (near byte {self.num_bytes}). "
                    "A compressed tar must be decompressed first"
                ) from error
            self._check_end(tar.offset)
            while self.read(1 << 20):  # What follows the end blocks belongs to the digest.
                pass

    def _check_end(self, offset: int) -> None:
        """Refuse a tar that goes on with something else than its end: tarfile takes a damaged header for the end."""
        with self._path.open("rb") as file:
            file.seek(offset)
            if file.read(BLOCK) != bytes(BLOCK):
                raise FormatError(
                    f"{self._path} is not a whole plain tar: at byte {offset} there is neither a member nor the end"
                )

    def read(self, num_bytes: int) -> bytes:
        """Read on and hash what was read (tarfile calls this)."""
        content = self._file.read(num_bytes)
        self._hash.update(content)
        self.num_bytes += len(content)
        return content

    _file: BinaryIO
