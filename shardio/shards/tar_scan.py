"""Scan tars with tarfile: the names of their members, or all their contents and hashes."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from shardio.errors import FormatError
from shardio.shards.forward import ForwardFile, ForwardReader
from shardio.shards.names import split_name
from shardio.shards.tar import BLOCK, MAX_MEMBER, TOO_LARGE
from shardio.storage import StoredFile, read_pieces

TAR_ERRORS = (tarfile.TarError, EOFError, ValueError, IndexError)
"""The errors that tarfile raises for a damaged tar: ValueError for invalid digits, IndexError for a truncated map of a
sparse file."""

WITHOUT_CONTENT = (tarfile.DIRTYPE, b"D", b"V")
"""The types of members that can be skipped: directories, and GNU tar's directory lists and volume labels."""

_LINKS = {
    tarfile.LNKTYPE: ("a hard link", "with tar --hard-dereference"),
    tarfile.SYMTYPE: ("a symbolic link", "with tar --dereference"),
}
"""For each type of link, its name and the GNU tar option that stores the link's target instead."""


def is_header(block: bytes) -> bool:
    """Return whether a block is the header of a member, according to its checksum."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def find_member(file: StoredFile, offset: int) -> tuple[str, int] | None:
    """Read all headers up to an offset and return name and size of the member whose content starts there, or None."""
    try:
        for info, _ in read_headers(ForwardFile(file)):
            if info.offset_data >= offset:
                return (info.name, info.size) if info.offset_data == offset else None
    except TAR_ERRORS:
        pass  # A damaged tar has no member there.
    return None


def list_names(file: StoredFile) -> list[str]:
    """Return the names of a tar's members.

    Raises:
        FormatError: If the file is not a tar, or is damaged.
    """
    try:
        return [info.name for info, _ in read_headers(ForwardFile(file))]
    except TAR_ERRORS as error:
        raise FormatError(f"{file.location} is not an uncompressed tar: {error}") from error


def read_headers(file: ForwardReader) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield a tar's members, and where each ends with its padding; raise one of TAR_ERRORS if the tar is damaged.

    A damaged header may also look like the end.
    """
    with file.open() as tar:
        for info in tar:
            yield info, tar.offset
            file.end_member()
            tar.members = []  # type: ignore[attr-defined]  # tarfile would remember every member


@dataclass(frozen=True, slots=True, kw_only=True)
class TarMember:
    """A regular file in a tar: its name, and its content's offset, size and xxh3-64."""

    name: str
    offset: int
    size: int
    hash: int


class TarScan:
    """Reads a whole tar once and hashes it.

    Attributes:
        num_bytes: The number of bytes read so far: the tar's size after all members were read.
        digest: xxh3-128 of those bytes, in hexadecimal.
        last_header: The plain header of the member that was yielded last, one block.
    """

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self.last_header = b""

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def members(self) -> Iterator[TarMember]:
        """Yield the regular files in tar order. Their contents are read piece by piece.

        Raises:
            FormatError: If the file is not an uncompressed tar, is truncated, or holds a member of more than
                :data:`MAX_MEMBER` bytes.
        """
        forward, stop = ForwardFile(self._file, self._hash), 0
        try:
            with forward.open() as tar:
                for info in tar:
                    refuse_without_content(str(self._file.location), info)
                    if info.isreg():
                        self.last_header = forward.last_read
                        yield self._read_member(forward, info, tar.offset)
                    forward.end_member()
                    self.num_bytes, stop = forward.position, tar.offset
                    tar.members = []  # type: ignore[attr-defined]  # tarfile would remember every member
            check_end(self._file, stop)  # tarfile's offset may be beyond headers that it mistakes for the end.
            forward.seek(forward.size)  # The digest includes the bytes after the end.
        except TAR_ERRORS as error:
            raise FormatError(
                f"{self._file.location} is not a complete, uncompressed tar: {error} (near byte {forward.position}). "
                "Decompress it, or download or create it again"
            ) from error
        self.num_bytes = forward.position

    def _read_member(self, file: ForwardFile, info: tarfile.TarInfo, next_header: int) -> TarMember:
        """Read a member's content and return the member."""
        check_member(str(self._file.location), info, next_header, file.size)
        content_hash, left = xxhash.xxh3_64(), info.size
        while left:
            piece = file.read_content(left)
            content_hash.update(piece)
            left -= len(piece)
        return TarMember(name=info.name, offset=info.offset_data, size=info.size, hash=content_hash.intdigest())


def check_member(tar: str, info: tarfile.TarInfo, next_header: int, tar_size: int) -> None:
    """Check the header of a regular file.

    Args:
        tar: The tar's location, for messages.
        info: The header.
        next_header: The offset of the next header, as tarfile computes it.
        tar_size: The tar's size in bytes.

    Raises:
        FormatError: If the content is not one range of bytes that a field can have.
    """
    where = f"{tar} holds {info.name} at byte {info.offset_data}"
    if info.issparse():
        raise FormatError(
            f"{where} as a sparse file, whose content is not one range of bytes: create the tar again without --sparse"
        )
    if not info.name or info.size < 0 or info.pax_headers.get("size", str(info.size)) != str(info.size):
        raise FormatError(
            f"the member of {tar} at byte {info.offset_data} has no name or no valid size: the tar is damaged. "
            "Download or create it again"
        )
    if info.offset_data + info.size > tar_size:
        raise FormatError(
            f"{tar} is not a complete tar: {info.name} at byte {info.offset_data} has {info.size} bytes, but the tar "
            f"ends at byte {tar_size}. Download or create it again"
        )
    if info.size > MAX_MEMBER:
        raise FormatError(f"{where} with {info.size} bytes, {TOO_LARGE}")
    if info.offset_data + info.size + -info.size % BLOCK != next_header:
        raise FormatError(f"{where} with two different sizes: the tar is damaged. Download or create it again")


def refuse_without_content(tar: str, info: tarfile.TarInfo) -> None:
    """Refuse a member that is named like a field but has no content of its own.

    Raises:
        FormatError: If this is such a member of the tar at location ``tar``.
    """
    if info.isreg() or info.type in WITHOUT_CONTENT or split_name(info.name) is None:
        return
    how, remedy = _LINKS.get(info.type, ("a special file", "without it"))
    target = f" to {info.linkname}" if info.type in _LINKS else ""
    raise FormatError(
        f"{tar} holds {info.name} as {how}{target} (its header ends at byte {info.offset_data}), which has no content "
        f"of its own: create the tar again {remedy}"
    )


def check_end(file: StoredFile, offset: int) -> None:
    """Refuse a tar in which anything but zeros follows the last member.

    tarfile mistakes a damaged header for the end, and ignores a second tar after the end of the first.

    Args:
        file: The tar.
        offset: The offset of the end mark, right after the last member.

    Raises:
        FormatError: If the end mark is missing, or data follows it.
    """
    start, position = min(offset, file.size), min(offset + BLOCK, file.size)
    if file.read(start, position) != bytes(BLOCK):
        raise FormatError(
            f"{file.location} is not a complete tar: neither a member nor the end mark is at byte {offset}. "
            "Download or create it again"
        )
    for piece in read_pieces(file, position):
        position += len(piece)
        if rest := bytes(piece).lstrip(b"\0"):
            raise data_after_end(str(file.location), position - len(rest))


def data_after_end(tar: str, offset: int) -> FormatError:
    """Return the error for a tar in which data follows the end mark."""
    return FormatError(
        f"{tar} has data after its end mark, at byte {offset}, as if tars had been joined with cat: the samples there "
        "would be left out. Join tars with tar --concatenate, or extract this one with tar --ignore-zeros and pack the "
        "files again"
    )
