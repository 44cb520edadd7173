"""The blocks of tars, with any values."""

from __future__ import annotations

import random

from shardio.shards.tar import BLOCK

EXTENDED = b"xgXLK"
"""Types of extended headers."""


def make_header(rng: random.Random, name: bytes, num_bytes: int, kind: int = 0x30) -> bytearray:
    """Return a header of one block with a right checksum, in one of the usual formats."""
    block = bytearray(BLOCK)
    block[:100] = name[:100].ljust(100, b"\0")
    block[100:124] = b"0000644\x000000000\x000000000\0"
    block[124:136] = encode_size(num_bytes)
    block[136:148] = b"%011o\0" % rng.choice((0, 0, 1_700_000_000))
    block[156] = kind
    block[257:265] = rng.choice((b"ustar\x0000", b"ustar\x0000", b"ustar  \0", bytes(8)))
    if len(name) > 100 and (cut := name.rfind(b"/", 0, 155)) > 0 and len(name) - cut <= 101:
        block[:100], block[345:500] = name[cut + 1 :].ljust(100, b"\0"), name[:cut].ljust(155, b"\0")
    return fix_checksum(block)


def encode_size(num_bytes: int) -> bytes:
    """Return a size in octal digits if possible, and otherwise in GNU's base 256."""
    if 0 <= num_bytes < 8**11:
        return b"%011o\0" % num_bytes
    return (b"\xff" if num_bytes < 0 else b"\x80") + (num_bytes % 256**11).to_bytes(11, "big")


def fix_checksum(block: bytearray, offset: int = 0) -> bytearray:
    """Write the right checksum into the header at an offset."""
    block[offset + 148 : offset + 156] = b" " * 8
    block[offset + 148 : offset + 156] = b"%06o\0 " % sum(block[offset : offset + BLOCK])
    return block


def pad(content: bytes) -> bytes:
    """Fill the last block with zeros."""
    return content + bytes(-len(content) % BLOCK)


def make_record(keyword: bytes, value: bytes) -> bytes:
    """Return a record of a pax header. Its length includes the length itself."""
    rest = b" " + keyword + b"=" + value + b"\n"
    length = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
    return b"%d" % length + rest
