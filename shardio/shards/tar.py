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

import xxhash

from shardio.errors import FormatError
from shardio.shards.forward import PIECE, ForwardFile
from shardio.shards.names import split_name

BLOCK = 512
"""The size of a tar block in bytes."""

END = bytes(2 * BLOCK)
"""What ends a tar."""

MAX_MEMBER = 2**31
"""Bytes of a member at the most. Samples are read whole, many at a time."""

TOO_LARGE = f"more than {MAX_MEMBER}, the most that a field of a sample may have: split it, or keep it beside the tars"
"""What is said of a member that is larger."""

TAR_ERRORS = (tarfile.TarError, EOFError, ValueError)
"""What tarfile raises for a damaged tar; ValueError where it reads digits."""

_WITHOUT_CONTENT = (tarfile.DIRTYPE, b"D", b"V")
"""Directories, the list of a directory's files and a volume's label, both of GNU tar: nothing is lost without them."""

_LINKS = {
    tarfile.LNKTYPE: ("a hard link", "with tar --hard-dereference"),
    tarfile.SYMTYPE: ("a symbolic link", "with tar --dereference"),
}
"""What links are called, and how GNU tar writes the file that they lead to in their place."""


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


def header_fits(header: bytes, key: bytes, suffix: bytes, num_bytes: int) -> bool:
    """Say whether a block can be the plain header of a member.

    Args:
        header: The block.
        key: The key in the member's name.
        suffix: The rest of the name, from the dot before the field, in lower case; its case does not count.
        num_bytes: The size of its content.

    Returns:
        False if the name or the size differs. Names that a plain header may hold shortened or in another encoding fit
        any name.
    """
    name = key + suffix
    if header.startswith(name + b"\0") and header[124:136] == b"%011o\0" % num_bytes:
        return True  # As nearly all of them are.
    if num_bytes < 8**11 and _read_size(header) not in (num_bytes, None):
        return False
    if len(name) > tarfile.LENGTH_NAME or not name.isascii():
        return True
    found = header[: tarfile.LENGTH_NAME].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    return any(
        whole.startswith(key) and whole[len(key) :].lower() == suffix for whole in (found, prefix + b"/" + found)
    )


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
        with path.open("rb") as raw, (file := ForwardFile(raw)).open() as tar:
            for info in tar:
                if info.offset_data >= offset:
                    return info.name if info.offset_data == offset else None
                file.end_member()
                tar.members = []  # type: ignore[attr-defined]  # tarfile would remember every member
    except TAR_ERRORS:
        pass  # What cannot be read as a tar has no member there.
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """A regular file in a tar: its name, the byte where its content begins, the content's size and its xxh3-64."""

    name: str
    offset: int
    size: int
    hash: int


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
        """Yield the regular files in their order. Of their content only a piece is in memory at a time.

        Raises:
            FormatError: If the file is not a plain tar, ends too early, or holds a member of more than
                :data:`MAX_MEMBER` bytes.
        """
        with self._path.open("rb") as raw:
            file = ForwardFile(raw, self._hash)
            try:
                with file.open() as tar:
                    for info in tar:
                        self._refuse_without_content(info)
                        if info.isreg():
                            yield self._read_member(file, info, tar.offset)
                        file.end_member()
                        self.num_bytes = file.position
                        tar.members = []  # type: ignore[attr-defined]  # tarfile would remember every member
            except TAR_ERRORS as error:
                raise FormatError(
                    f"{self._path} is not a whole plain tar: {error} (near byte {file.position}). "
                    "A compressed tar must be decompressed first"
                ) from error
            self._check_end(tar.offset)
            while file.read_content(PIECE):  # What follows the end blocks belongs to the digest.
                pass
            self.num_bytes = file.position

    def _read_member(self, file: ForwardFile, info: tarfile.TarInfo, next_header: int) -> TarMember:
        """Return a member, after reading its content."""
        where = f"{self._path} holds {info.name} at byte {info.offset_data}"
        if info.issparse():
            raise FormatError(
                f"{where} as a sparse file, whose content is not one range of bytes: pack it again without --sparse"
            )
        if not info.name or info.size < 0 or info.pax_headers.get("size", str(info.size)) != str(info.size):
            raise FormatError(f"{where} without a name or a valid size: it is damaged. Fetch or pack it again")
        if info.offset_data + info.size > file.size:
            raise FormatError(
                f"{self._path} is not a whole plain tar: {info.name} at byte {info.offset_data} has {info.size} bytes, "
                f"and the tar ends at byte {file.size}. Fetch or pack it again"
            )
        if info.size > MAX_MEMBER:
            raise FormatError(f"{where} with {info.size} bytes, {TOO_LARGE}")
        if info.offset_data + info.size + -info.size % BLOCK != next_header:
            raise FormatError(f"{where} with two sizes that differ: it is damaged. Fetch or pack it again")
        content_hash, left = xxhash.xxh3_64(), info.size
        while left:
            piece = file.read_content(min(PIECE, left))
            if not piece:
                raise FormatError(f"{self._path} was cut while it was read, at byte {file.position}")
            content_hash.update(piece)
            left -= len(piece)
        return TarMember(name=info.name, offset=info.offset_data, size=info.size, hash=content_hash.intdigest())

    def _refuse_without_content(self, info: tarfile.TarInfo) -> None:
        """Refuse a member that is named as a field of a sample and has no content of its own."""
        if info.isreg() or info.type in _WITHOUT_CONTENT or split_name(info.name) is None:
            return
        how, remedy = _LINKS.get(info.type, ("no regular file", "without it"))
        target = f" to {info.linkname}" if info.type in _LINKS else ""
        raise FormatError(
            f"{self._path} holds {info.name} as {how}{target} (its header ends at byte {info.offset_data}), without "
            f"content of its own: pack it again {remedy}"
        )

    def _check_end(self, offset: int) -> None:
        """Refuse a tar that continues with anything but its end mark and zeros.

        tarfile takes a damaged header for the end, and passes over a second tar that was appended.
        """
        with self._path.open("rb") as file:
            file.seek(offset)
            if file.read(BLOCK) != bytes(BLOCK):
                raise FormatError(
                    f"{self._path} is not a whole plain tar: at byte {offset} there is neither a member nor the end"
                )
            while piece := file.read(PIECE):
                if rest := piece.lstrip(b"\0"):
                    raise FormatError(
                        f"{self._path} goes on behind its end: byte {file.tell() - len(rest)} is not zero, as after "
                        "cat a.tar b.tar, and samples there would be left out. Join tars by tar --concatenate, or "
                        "extract it with tar --ignore-zeros and pack the files again"
                    )
