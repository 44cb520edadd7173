"""Write and parse plain POSIX tars (IEEE Std 1003.1, "pax Interchange Format") with WebDataset's naming.

Each member consists of a header of whole 512-byte blocks, its content, and zeros up to the next block. Two zero blocks
end the file. Time, owner and mode are constants, so equal input gives equal bytes. If a name does not fit the plain
header, a pax header precedes it. The block right before the content is always the member's own plain header.

A member ``path/key.field`` belongs to sample ``path/key``; the key ends at the first dot of the base name. WebDataset
expects the members of a sample to be adjacent. In tars created without ``tar --sort=name``, members may be scattered.
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import BinaryIO, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.sample import Sample
from shardio.storage import Writer

BLOCK = 512
"""The size of a tar block in bytes."""

MAX_PLAIN_NAME = 100
"""The maximum length of a name in a plain header, in bytes."""

Ints = NDArray[np.int64]
"""Offsets, sizes or indices."""

END = bytes(2 * BLOCK)
"""The end of a tar."""

MAX_MEMBER = 2**31
"""The maximum size of a member in bytes. The size is limited because many whole samples are in memory at a time."""

TOO_LARGE = f"more than {MAX_MEMBER}, the maximum size of a field: split it, or keep it outside the tars"
"""The end of an error message about a member that is too large."""

LABEL_FIELD = "cls"
"""The field that holds a sample's label, in ASCII digits."""


def make_header(name: str, num_bytes: int) -> bytes:
    """Return the header of a member: one block, or three or more if the name needs a pax header."""
    if not fits_plain_header(name, num_bytes):
        return _make_header_by_tarfile(name, num_bytes)
    template, template_sum = _plain_template()
    encoded, size = name.encode(), b"%011o" % num_bytes
    checksum = b"%06o" % (template_sum + sum(encoded) + sum(size) - len(size) * ord("0"))
    rest = template[124 + len(size) : 148], template[148 + len(checksum) :]
    return b"".join((encoded, template[len(encoded) : 124], size, rest[0], checksum, rest[1]))


def fits_plain_header(name: str, num_bytes: int) -> bool:
    """Return whether a member needs no pax header."""
    return name.isascii() and 0 < len(name) <= MAX_PLAIN_NAME and num_bytes < 8**11


@cache
def _plain_template() -> tuple[bytes, int]:
    template = _make_header_by_tarfile("", 0)
    return template, int(template[148:154], 8)


def _make_header_by_tarfile(name: str, num_bytes: int) -> bytes:
    import tarfile  # Importing tarfile takes 4 ms, and reading samples does not need it.

    info = tarfile.TarInfo(name)
    info.size = num_bytes
    info.mode = 0o644
    return info.tobuf(format=tarfile.PAX_FORMAT)


def make_padding(num_bytes: int) -> bytes:
    """Return the zeros that fill the last block of a member of ``num_bytes`` bytes."""
    return bytes(-num_bytes % BLOCK)


def size_in_tar(name: str, num_bytes: int) -> int:
    """Return the size of a member in a tar, in bytes: header, content and padding."""
    header = BLOCK if fits_plain_header(name, num_bytes) else len(make_header(name, num_bytes))
    return header + num_bytes + -num_bytes % BLOCK


def header_fits(header: bytes, key: bytes, suffix: bytes, num_bytes: int) -> bool:
    """Return whether a block can be the plain header of a member.

    Args:
        header: The block.
        key: The key in the member's name.
        suffix: The rest of the name, from the dot before the field, in lowercase. The header may have capital
            letters.
        num_bytes: The size of the content.

    Returns:
        False if the name or the size differs. If a plain header may shorten the name or encode it differently, the
        name is not compared.
    """
    name = key + suffix
    if header.startswith(name + b"\0") and header[124:136] == b"%011o\0" % num_bytes and not header[345]:
        return True  # Nearly all headers match this fast check.
    if num_bytes < 8**11 and _read_size(header) not in (num_bytes, None):
        return False
    if len(name) > MAX_PLAIN_NAME or not name.isascii():
        return True
    found = header[:MAX_PLAIN_NAME].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    whole = prefix + b"/" + found if prefix else found
    return whole.startswith(key) and whole[len(key) :].lower() == suffix


def _read_size(header: bytes) -> int | None:
    digits = header[124:136].split(b"\0", 1)[0].strip()
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None


_META_NAME = re.compile(r"__[^/]*__(/|$)")


def split_name(name: str) -> tuple[str, str] | None:
    r"""Split a member's name into key and field, or return None if WebDataset would not read the member.

    The result is the same as with WebDataset's regular expression, ``((?:.*/)?[^.]+)\.([^/]*)``, which takes quadratic
    time for hostile names. For example, the field of ``x/.y`` is ``y``, and its key ends with the slash.

    >>> split_name("cats/0001.JPG")
    ('cats/0001', 'jpg')
    >>> split_name("cats/0001.seg.png")
    ('cats/0001', 'seg.png')
    >>> split_name("cats/README")
    """
    slash = name.rfind("/")
    dot = name.find(".", slash + 1)
    if dot < 0 or _META_NAME.match(name):
        return None
    if dot == slash + 1 and (slash < 0 or "." in name[name.rfind("/", 0, slash) + 1 : slash]):
        return None
    return name[:dot], name[dot + 1 :].lower()


def join_name(key: str, field: str) -> str:
    """Return the name of the member that holds ``field`` of the sample ``key``."""
    return f"{key}.{field}"


def is_added_by_macos(name: str) -> bool:
    """Return whether a file was added by macOS, such as ``._x.jpg`` (AppleDouble) or ``.DS_Store``."""
    name = name.rpartition("/")[2]
    return name.startswith("._") or name == ".DS_Store"


class Member(Protocol):
    """A tar member whose content has a known offset."""

    @property
    def offset(self) -> int:
        """The offset of the member's content."""


Some = TypeVar("Some", bound=Member)


def group_members(tar: str, named: Iterable[tuple[tuple[str, str], Some]]) -> Iterator[tuple[str, dict[str, Some]]]:
    """Group adjacent members with the same key into samples.

    Args:
        tar: The tar's location, for messages.
        named: Each member's key and field, and the member, in tar order.

    Yields:
        The key of each sample, and its members by field.

    Raises:
        FormatError: If a sample has a field twice.
    """
    for key, members in groupby(named, lambda pair: pair[0][0]):
        fields: dict[str, Some] = {}
        for (_, field), member in members:
            if field in fields:
                raise FormatError(
                    f"{tar} holds field {field!r} of sample {key} twice, the second time at byte {member.offset}: "
                    "create the tar again without one of the two"
                )
            fields[field] = member
        yield key, fields


def gather_members(tar: str, runs: Sequence[tuple[str, dict[str, Some]]]) -> list[tuple[str, dict[str, Some]]]:
    """Join runs of adjacent members into samples: all runs with the same key become one sample.

    If all runs of a key have the same fields, the runs stay separate samples, as in WebDataset.

    Args:
        tar: The tar's location, for messages.
        runs: The key of each run, and its members by field, in tar order.

    Returns:
        The key of each sample, and its members by field, in the order of the samples' first members.

    Raises:
        FormatError: If runs of one key share some fields, but not all.
    """
    counts = Counter(key for key, _ in runs)
    if len(counts) == len(runs):
        return list(runs)
    of_key = defaultdict[str, list[dict[str, Some]]](list)
    for key, fields in runs:
        if counts[key] > 1:
            of_key[key].append(fields)
    joined = {key: _join_runs(tar, key, found) for key, found in of_key.items()}
    samples = list[tuple[str, dict[str, Some]]]()
    for key, fields in runs:
        sample = joined.get(key)
        if sample is None:
            samples.append((key, fields))
        elif fields is of_key[key][0]:
            samples.append((key, sample))
    return samples


def _join_runs(tar: str, key: str, runs: Sequence[dict[str, Some]]) -> dict[str, Some] | None:
    """Return the members of several runs of one key as one sample, or None if each run is a sample of its own."""
    counts = Counter(field for run in runs for field in run)
    if len(counts) == counts.total():
        return {field: member for run in runs for field, member in run.items()}
    if set(counts.values()) == {len(runs)}:
        return None
    field = next(field for field, count in counts.items() if count > 1)
    first, second = [run[field].offset for run in runs if field in run][:2]
    raise FormatError(
        f"{tar} holds field {field!r} of sample {key} twice, at bytes {first} and {second}, and the sample's members "
        "are not adjacent, so it is unknown which members belong together: create the tar again without one of the two"
    )


_DIGIT_SHIFTS = np.arange(30, -1, -3)
"""The bit positions of the 11 octal digits of a size."""


def are_plain_headers(blocks: NDArray[np.uint8], names: Sequence[bytes], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which blocks are the plain headers of members with these names and sizes, bool [n].

    If the result is False, :func:`header_fits` must decide: names of 100 bytes, and names and sizes that a header may
    encode in several ways, are not compared.

    Args:
        blocks: uint8 [n, 512], the blocks.
        names: The n names.
        sizes: int64 [n], sizes in bytes, not negative.
    """
    lengths = np.fromiter(map(len, names), np.int64, len(names))
    width = min(int(lengths.max(initial=0)) + 1, MAX_PLAIN_NAME)  # Each compared name ends with a zero byte.
    stored_names = np.ascontiguousarray(blocks[:, :width]).view(f"S{width}")[:, 0]
    fits: NDArray[np.bool_] = (stored_names == np.array(names, f"S{width}")) & (lengths < width) & (sizes < 8**11)
    digits = (sizes[:, None] >> _DIGIT_SHIFTS & 7).astype(np.uint8) + ord("0")
    fits &= (blocks[:, 124:135] == digits).all(axis=1) & (blocks[:, 135] == 0)
    fits &= blocks[:, 345] == 0  # Otherwise, the prefix field contains the name's folder.
    return fits


GZIP_ERRORS = (gzip.BadGzipFile, zlib.error, EOFError)
"""The errors that a file from :func:`decompress` raises for a damaged or truncated stream."""


def decompress(pieces: Iterator[bytes] | Iterator[memoryview]) -> gzip.GzipFile:
    """Return the decompressed content of a gzip-compressed stream. Each piece may overwrite the previous piece."""
    stream = io.BufferedReader(_PieceStream(pieces), PIECE)
    return gzip.GzipFile(fileobj=cast(BinaryIO, stream), mode="rb")


class _PieceStream(io.RawIOBase):
    def __init__(self, pieces: Iterator[bytes] | Iterator[memoryview]) -> None:
        self._pieces, self._left = (memoryview(piece) for piece in pieces), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # narrower
        self._left = self._left or next(self._pieces, self._left)
        num_read = min(len(buffer), len(self._left))
        buffer[:num_read], self._left = self._left[:num_read], self._left[num_read:]
        return num_read


PIECE = 2**20
"""The number of bytes to collect before they are written and hashed: enough to keep the number of calls low, but few
enough to stay in the processor's cache."""


class StoredField(NamedTuple):
    """The offset in the tar, the size and the xxh3-64 of a field's content."""

    offset: int
    size: int
    hash: int


class StoredSample(NamedTuple):
    """The key of one sample, and its fields by name."""

    key: str
    fields: Mapping[str, StoredField]


class TarWriter:
    """Writes samples to a tar, and records the location of each field.

    Attributes:
        num_bytes: The size of the tar so far, in bytes.
        stored: The samples, in tar order.
        headers_of_first: The plain headers of the first sample's members, by the offsets of the contents.
        headers: The plain headers of the last sample so far.

    Args:
        file: The destination of the tar.
    """

    def __init__(self, file: Writer) -> None:
        self._file = file
        self._buffer, self._num_pending = bytearray(PIECE), 0  # The buffer is reused: new memory is slow.
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0
        self.stored = list[StoredSample]()
        self.headers_of_first = dict[int, bytes]()
        self.headers = dict[int, bytes]()

    @property
    def digest(self) -> str:
        """The xxh3-128 of the tar in hexadecimal, after :meth:`end`."""
        return self._hash.hexdigest()

    def add(self, sample: Sample) -> None:
        """Write a sample."""
        fields = dict[str, StoredField]()
        self.headers = {}
        for name, content in sample.fields.items():
            size = len(content)
            header, padding = make_header(join_name(sample.key, name), size), make_padding(size)
            start = self.num_bytes + len(header)
            self.headers[start] = header[-BLOCK:]
            fields[name] = StoredField(start, size, xxhash.xxh3_64_intdigest(content))
            self.num_bytes = start + size + len(padding)
            if size < PIECE:
                self._collect(header, content, padding)
            else:
                self._collect(header)
                self._flush()
                self._write(content)
                self._collect(padding)
        self.headers_of_first = self.headers_of_first or self.headers
        self.stored.append(StoredSample(sample.key, fields))

    def end(self) -> None:
        """Write the end of the tar."""
        self._collect(END)
        self.num_bytes += len(END)
        self._flush()

    def _collect(self, *pieces: bytes) -> None:
        for piece in pieces:
            if self._num_pending + len(piece) > PIECE:
                self._flush()
            self._buffer[self._num_pending : self._num_pending + len(piece)] = piece
            self._num_pending += len(piece)

    def _flush(self) -> None:
        with memoryview(self._buffer) as view:
            self._write(view[: self._num_pending])
        self._num_pending = 0

    def _write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._hash.update(content)
