"""The layout of plain POSIX tars (IEEE Std 1003.1, "pax Interchange Format").

Each member is a header of whole 512-byte blocks, its content, and zeros up to the next block. Two zero blocks end the
file. Time, owner and mode are constants, so equal input gives equal bytes. If a name does not fit the plain header, a
pax header precedes it. The block right before the content is always the member's own plain header.
"""

from __future__ import annotations

import re
from functools import cache

BLOCK = 512
"""The size of a tar block in bytes."""

MAX_PLAIN_NAME = 100
"""The maximum length of a name in a plain header, in bytes."""

END = bytes(2 * BLOCK)
"""The end of a tar."""

MAX_MEMBER = 2**31
"""The maximum size of a member in bytes, because whole samples are read, many at a time."""

TOO_LARGE = f"more than {MAX_MEMBER}, the largest size of a field: split it, or keep it outside the tars"
"""The end of an error message about a larger member."""


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
    """Return the header of an empty member without a name, and its checksum."""
    template = _make_header_by_tarfile("", 0)
    return template, int(template[148:154], 8)


def _make_header_by_tarfile(name: str, num_bytes: int) -> bytes:
    import tarfile  # It takes 4 ms, and reading samples does not need it.

    info = tarfile.TarInfo(name)
    info.size = num_bytes
    info.mode = 0o644
    return info.tobuf(format=tarfile.PAX_FORMAT)


def make_padding(num_bytes: int) -> bytes:
    """Return the zeros that fill the last block of a content of ``num_bytes`` bytes."""
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
        suffix: The rest of the name, from the dot before the field, in lower case. The case in the tar does not matter.
        num_bytes: The size of the content.

    Returns:
        False if the name or the size differs. A name that a plain header may shorten or encode differently fits any
        header.
    """
    name = key + suffix
    if header.startswith(name + b"\0") and header[124:136] == b"%011o\0" % num_bytes and not header[345]:
        return True  # Nearly always.
    if num_bytes < 8**11 and _read_size(header) not in (num_bytes, None):
        return False
    if len(name) > MAX_PLAIN_NAME or not name.isascii():
        return True
    found = header[:MAX_PLAIN_NAME].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    whole = prefix + b"/" + found if prefix else found
    return whole.startswith(key) and whole[len(key) :].lower() == suffix


def _read_size(header: bytes) -> int | None:
    """Return the size in a header, or None if it is not in octal digits."""
    digits = header[124:136].split(b"\0", 1)[0].strip()
    return int(digits or b"0", 8) if re.fullmatch(rb"[0-7]*", digits) else None
