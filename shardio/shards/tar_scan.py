"""Read tars with tarfile: the headers of their members, whole tars with hashes, or streams of samples.

tarfile trusts the sizes in headers: it reads an extended header of any length in one call, calls itself recursively for
consecutive extended headers, and seeks forward or backward by any number of bytes. Therefore, tarfile
reads from a :class:`ForwardReader`, which limits the lengths, the recursion and the seeks.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import BinaryIO, NamedTuple, cast

import xxhash

from shardio.errors import FormatError
from shardio.shards.index import hash_key
from shardio.shards.tar import (
    BLOCK,
    GZIP_ERRORS,
    MAX_MEMBER,
    TOO_LARGE,
    StoredField,
    decompress,
    group_members,
    is_added_by_macos,
    split_name,
)
from shardio.storage import StoredFile, read_pieces

MAX_HEADER_BYTES = 2**20
"""The maximum size of a header in bytes. A pax header holds a file's name and attributes, and is much smaller."""

MAX_HEADER_READS = 128
"""The maximum number of reads for one member's headers. A member may have one or two extended headers, and each takes
two reads."""

MAX_RECORDS = 1000
"""The maximum number of records in a pax header, and of different keywords in all global pax headers together. The
latter is limited because tarfile copies these keywords for each member."""

MAX_DIGITS = 256
"""The maximum number of consecutive digits in a pax header. The time that tarfile's regular expressions take grows
with the square of this number (CVE-2024-6232)."""

HEADERS_PIECE = 2**16
"""The number of bytes to read at a time if contents are skipped."""

UNKNOWN_SIZE = 2**63 - 1
"""The size of a stream whose real size is known only at its end. All tars are smaller."""

_STREAM_PIECE = 2**18
"""The number of bytes of a stream to decompress at a time."""

TAR_ERRORS = (tarfile.TarError, EOFError, ValueError, IndexError)
"""The errors that tarfile raises for a damaged tar. ValueError means invalid digits, and IndexError means a truncated
map of a sparse file."""

WITHOUT_CONTENT = (tarfile.DIRTYPE, b"D", b"V")
"""The types of members that can be skipped: directories, and GNU tar's directory lists and volume labels."""

_LINKS = {
    tarfile.LNKTYPE: ("a hard link", "with tar --hard-dereference"),
    tarfile.SYMTYPE: ("a symbolic link", "with tar --dereference"),
}
"""For each type of link, its name and the GNU tar option that stores the link's target instead."""

_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
EXTENDED = (*_PAX, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
"""The types of headers that precede the header of the member itself."""

_IS_DIGIT = bytes(48 <= byte < 58 for byte in range(256))
"""A table of all bytes, with 1 for each digit and 0 for any other byte."""

_GZIP = b"\x1f\x8b"
_OTHERS = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4"}
"""The first bytes of compressed files, with the names of the programs that compress them."""


class ForwardReader:
    """A file object for tarfile that reads all bytes of a tar in order.

    Attributes:
        size: The tar's size in bytes, or UNKNOWN_SIZE.
        position: The offset of the next byte to read.
        last_read: The block that tarfile read last, which is the plain header of the current member.

    Args:
        pieces: The tar's content. Each piece may overwrite the previous piece.
        size: The tar's size in bytes.
    """

    def __init__(self, pieces: Iterator[memoryview], size: int = UNKNOWN_SIZE) -> None:
        self.size = size
        self.position = 0
        self.last_read = b""
        self._num_reads = 0
        self._extended = b""  # The type of the extended header that tarfile reads next, or empty.
        self._global_keywords = set[bytes]()
        self._pieces = pieces
        self._piece = memoryview(b"")  # Bytes after `position` that have already been read.

    def open(self) -> tarfile.TarFile:
        """Return a TarFile that reads this file.

        Raises:
            tarfile.TarError: If the first header is damaged. For later headers, iterating over the TarFile raises the
                error.
        """
        return tarfile.open(fileobj=cast(BinaryIO, self), mode="r:")

    def read(self, num_bytes: int) -> bytes:
        """Read a header or a part of a header. tarfile calls this method."""
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
        """Raise ReadError if tarfile has just read a pax header that it would parse in quadratic time."""
        kind, self._extended = self._extended, b""
        if not kind and num_bytes == BLOCK:
            kind = self.last_read[156:157]
            self._extended = kind if kind in EXTENDED else b""
        elif kind in _PAX:
            keywords = _find_keywords(self.last_read)
            if kind == tarfile.XGLTYPE:
                self._global_keywords.update(keywords)
            if max(len(keywords), len(self._global_keywords)) > MAX_RECORDS:
                raise tarfile.ReadError(f"pax headers have more than {MAX_RECORDS} records")

    def read_content(self, max_bytes: int) -> memoryview:
        """Return the next 1 to ``max_bytes`` bytes, or no bytes at the end of the file.

        The next call may overwrite these bytes.
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
        """Read bytes up to an offset, or up to the end of the tar. tarfile calls this method."""
        if not self.position <= position <= self.size:
            raise tarfile.ReadError(
                f"the tar places the next header at byte {position}, which is outside bytes {self.position} to "
                f"{self.size}"
            )
        while self.position < position and self.read_content(position - self.position):
            pass
        return self.position

    def tell(self) -> int:
        """Return the offset of the next byte to read. tarfile calls this method."""
        return self.position


class ForwardFile(ForwardReader):
    """A stored tar as a file object for tarfile.

    Args:
        file: The open tar.
        digest: A digest to update with all bytes, including skipped bytes. Without a digest, contents are not read.
    """

    def __init__(self, file: StoredFile, digest: xxhash.xxh3_128 | None = None) -> None:
        self._file, self._digest = file, digest
        super().__init__(self._read_from(0), file.size)

    def seek(self, position: int) -> int:
        """Read or skip bytes up to an offset. tarfile calls this method."""
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

    Records without an equals sign are rejected, because old versions of tarfile would search the rest of the header.

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
            raise tarfile.ReadError(f"a pax header has an invalid record at byte {position} of the header")
        keywords.append(header[space + 1 : equals])
        position = stop
    return keywords


def is_header(block: bytes) -> bool:
    """Return whether a block is the header of a member, according to its checksum."""
    try:
        tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def find_member(file: StoredFile, offset: int) -> tuple[str, int] | None:
    """Return the name and size of the member whose content starts at an offset, or None if no content starts there."""
    try:
        for info, _ in read_headers(ForwardFile(file)):
            if info.offset_data >= offset:
                return (info.name, info.size) if info.offset_data == offset else None
    except TAR_ERRORS:
        pass  # In a damaged tar, no member is found at the offset.
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
    """Yield a tar's members, each with the offset at which its padding ends.

    Raise one of :data:`TAR_ERRORS` if the tar is damaged. However, some damaged headers look like the end of the tar,
    and the iteration then ends early without an error.
    """
    with file.open() as tar:
        for info in tar:
            yield info, tar.offset
            file.end_member()
            tar.members = []  # type: ignore[attr-defined]  # Otherwise, TarFile would keep all members.


class TarScan:
    """A scan that reads a whole tar once and hashes it.

    Attributes:
        last_header: The plain header of the last yielded member, one block.
    """

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self.last_header = b""

    @property
    def digest(self) -> str:
        """The xxh3-128 of the bytes read so far, in hexadecimal; after the last member, that of the whole tar."""
        return self._hash.hexdigest()

    def members(self) -> Iterator[tuple[str, StoredField]]:
        """Yield the names and the contents of the regular files in tar order. Contents are read piece by piece.

        Raises:
            FormatError: If the file is not an uncompressed tar, is truncated, or holds a member of more than
                :data:`MAX_MEMBER` bytes.
        """
        forward, stop = ForwardFile(self._file, self._hash), 0
        try:
            for info, next_header in read_headers(forward):
                refuse_without_content(str(self._file.location), info)
                if info.isreg():
                    self.last_header = forward.last_read
                    yield info.name, self._read_content(forward, info, next_header)
                stop = next_header
            check_end(self._file, stop)  # tarfile's own offset may be after a header that it mistakes for the end.
            forward.seek(forward.size)  # The digest includes the bytes after the end.
        except TAR_ERRORS as error:
            raise FormatError(
                f"{self._file.location} is not a complete, uncompressed tar: {error} (near byte {forward.position}). "
                "Decompress it, or download or create it again"
            ) from error

    def _read_content(self, file: ForwardFile, info: tarfile.TarInfo, next_header: int) -> StoredField:
        check_member(str(self._file.location), info, next_header, file.size)
        content_hash, left = xxhash.xxh3_64(), info.size
        while left:
            piece = file.read_content(left)
            content_hash.update(piece)
            left -= len(piece)
        return StoredField(offset=info.offset_data, size=info.size, hash=content_hash.intdigest())


def check_member(tar: str, info: tarfile.TarInfo, next_header: int, tar_size: int) -> None:
    """Check the header of a regular file.

    Args:
        tar: The tar's location, for messages.
        info: The header.
        next_header: The offset of the next header, as tarfile computes it.
        tar_size: The tar's size in bytes.

    Raises:
        FormatError: If the member is sparse, damaged, cut off by the end of the tar, or too large for a field.
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
        FormatError: If the member of the tar at location ``tar`` has no content of its own.
    """
    if info.isreg() or info.type in WITHOUT_CONTENT or split_name(info.name) is None:
        return
    how, remedy = _LINKS.get(info.type, ("a special file", "without it"))
    target = f" to {info.linkname}" if info.type in _LINKS else ""
    raise FormatError(
        f"{tar} holds {info.name} as {how}{target} (its header ends at byte {info.offset_data}), so it has no content "
        f"of its own: create the tar again {remedy}"
    )


def check_end(file: StoredFile, offset: int) -> None:
    """Refuse a tar in which anything other than zeros follows the last member.

    tarfile mistakes a damaged header for the end, and ignores a second tar after the end of the first tar.

    Args:
        file: The tar.
        offset: The expected offset of the end mark, right after the last member.

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


class IncompleteTarError(FormatError):
    """The error for a streamed tar that ends too early or is damaged. Another transfer may succeed.

    The message contains only the cause.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedSample:
    """A sample of a stream.

    Attributes:
        key: The sample's key.
        offset: The offset of the first field's content in the (decompressed) tar.
        contents: The contents of the requested fields.
        digest: The xxh3-64 of the member names and sizes of all samples in the tar, up to and including this sample.
    """

    key: str
    offset: int
    contents: dict[str, bytes]
    digest: int


class _Member(NamedTuple):
    offset: int
    size: int
    content: bytes | None  # None if the field was not requested.


class StreamedTar:
    """A tar that is read forward, and yields the same samples as its index, in the same order.

    An index gathers the members of scattered samples. A stream raises an error at the second part of a scattered
    sample, after it has yielded the first part.

    Args:
        name: The tar's name, for messages.
        read: A function that returns the next bytes of the stream, or no bytes at its end.
        fields: The fields whose contents are kept.
    """

    def __init__(self, name: str, read: Callable[[], bytes], fields: Collection[str]) -> None:
        self._name, self._fields = name, frozenset(fields)
        self._reader = ForwardReader(_read_pieces(name, read))

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the (decompressed) tar that have been read."""
        return self._reader.position

    def samples(self) -> Iterator[StreamedSample]:
        """Yield the samples. A sample is yielded when all of its fields have been read.

        Raises:
            IncompleteTarError: If the tar is damaged or has no end mark.
            FormatError: If the stream is not a tar of samples, or the members of a sample are not adjacent.
        """
        digest, field_sets = 0, dict[frozenset[str], int]()
        fields_of = dict[int, int]()  # Maps each key's hash to the number of the key's set of fields.
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
            "ShardDataset, which gathers the members, or create the tar again with tar --sort=name"
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
        """Read the rest of the stream, which must be zeros. tarfile has already read the block at ``stop``."""
        reader = self._reader
        if reader.position != stop + BLOCK or reader.last_read != bytes(BLOCK):
            raise EOFError(f"neither a member nor the end mark is at byte {stop}")
        while piece := reader.read_content(_STREAM_PIECE):
            if rest := bytes(piece).lstrip(b"\0"):
                raise data_after_end(self._name, reader.position - len(rest))


def _read_pieces(name: str, read: Callable[[], bytes]) -> Iterator[memoryview]:
    pieces, first = iter(read, b""), b""
    while len(first) < BLOCK and (piece := next(pieces, b"")):
        first += piece
    for start, program in _OTHERS.items():
        if first.startswith(start):
            raise FormatError(
                f"{name} is compressed with {program}, which shardio cannot stream: decompress it in the command, "
                f"as in 'pipe:cat x.tar.{program} | {program} -dc'"
            )
    pieces = chain([first], pieces)
    if not first.startswith(_GZIP):
        yield from (memoryview(piece) for piece in pieces)
        return
    with closing(decompress(pieces)) as file:
        try:
            while piece := file.read(_STREAM_PIECE):
                yield memoryview(piece)
        except GZIP_ERRORS as error:
            raise IncompleteTarError(f"it is not a complete gzip file: {error}") from error
