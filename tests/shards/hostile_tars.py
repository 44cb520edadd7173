"""Random hostile tars: blocks whose fields have false values, extended headers of all kinds, and damaged bytes."""

from __future__ import annotations

import random

from shardio.shards.tar import BLOCK, END
from tests.shards.large_tars import LARGE
from tests.shards.tar_blocks import EXTENDED, encode_size, fix_checksum, make_header, make_record, pad
from tests.shards.tar_damage import damage

MAX_BYTES = 2**20
"""The maximum size of a tar."""

KINDS = b"0\x007125346xgXLKSDVMNAQ9\xff"
"""Types of members, known and unknown."""

SIZES = (-(2**94), -(2**63), -(2**31), -513, -512, -1, 1, 511, 513, 4096, 2**20, 2**31 + 1, 8**11, 2**62, 2**63, 2**93)
"""Sizes to claim. Those that fit neither octal digits nor the sign are written in base 256."""

NAMES = (
    *b"a.txt a.jpg b.txt b.JPG b.seg.png dir/c.cls c.cls README .hidden x/.y /etc/x.txt ../../x.txt a/../b.txt".split(),
    *b"._a.txt .DS_Store __meta__/a.txt a/ / . a. a..b a.txt/ C:\\x.txt".split(),
    *(b"", b"a\0b.txt", b"\xff\xfe.txt", "bé.txt".encode(), b"\n.txt", b"a b.c d", b"\xed\xa0\x80.t"),
    *(b"d" * 90 + b"/" + b"e" * 60 + b".txt", b"n" * 96 + b".txt", b"n" * 97 + b".txt", b"k" * 300 + b".f"),
)

KEYWORDS = (
    *b"path path path size size linkpath mtime uid hdrcharset comment charset SCHILY.xattr.user.x".split(),
    *(b"GNU.sparse." + name for name in b"map size realsize major minor name offset numbytes".split()),
    *(b"", b"\xff", b"a b"),
)

VALUES = (
    *b"0 1 -1 3 512 1024 2 1e999 nan -inf abc BINARY 1,2,3 0,1 1.5 0x10 1_0 = \0".split(),
    *(b"", b"9" * 30, b"9" * 5000, b"\xff\xff", b"x\ny=z", b" 7 ", b"\xd9\xa3", b"\n"),
)


def make_tar(rng: random.Random) -> bytes:
    """Return a tar: rarely a large one, and mostly a few members, of which some are false."""
    if rng.random() < 0.0005:
        tar = bytearray(rng.choice(LARGE)(rng))
    else:
        tar = bytearray()
        falsehood = rng.choice((0.0, 0.1, 0.4))
        for _ in range(rng.choice((0, 1, 2, 3, 4, 6))):
            tar += _make_member(rng, falsehood)
        tar += rng.choices(ENDS, (80, 5, 5, 5, 5))[0]
    if rng.random() < 0.5:
        damage(tar, rng)
    return bytes(tar[:MAX_BYTES])


ENDS = (END, b"", bytes(BLOCK), bytes(10240), END + b"x" + bytes(511))


def _make_content(rng: random.Random) -> bytes:
    return bytes([rng.randrange(256)]) * rng.choice((0, 1, 3, 100, 511, 512, 513, 1500))


def _make_name(rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return b"%d.%s" % (rng.randrange(9), rng.choice((b"txt", b"jpg", b"cls", b"seg.png")))
    return rng.choice(NAMES)


def _make_member(rng: random.Random, falsehood: float) -> bytes:
    """Return a member with its extended headers."""
    name, content, kind = _make_name(rng), _make_content(rng), 0x30
    head = b""
    if len(name) > 100 or rng.random() < 0.25:
        head, name = _make_extended(rng, name, len(content), falsehood), b"short" if rng.random() < 0.5 else name
    if rng.random() < falsehood:
        kind = rng.choice(KINDS)
    header = make_header(rng, name, len(content), kind)
    if rng.random() < falsehood:
        falsify(header, rng)
    return head + bytes(header) + pad(content)


RECORDS = (b"0 a=b\n", b"5 a=b\n", b"99 a=b\n", b"7 a=bcd", b"7 abcd\n", b"x", b"9" * 30, b"-5 a=b\n")
"""False records of a pax header."""


def _make_extended(rng: random.Random, name: bytes, num_bytes: int, falsehood: float) -> bytes:
    """Return one or several extended headers."""
    found = b""
    for _ in range(rng.choice((1, 1, 1, 2, 3)) if rng.random() > falsehood / 20 else rng.choice((40, 70, 200))):
        kind = rng.choice(EXTENDED)
        if kind in b"LK":
            payload = name + b"\0"
        else:
            payload = make_record(b"path", name) if rng.random() < 0.6 else b""
            if rng.random() < 0.3:
                payload += make_record(b"size", b"%d" % num_bytes)
            while rng.random() < falsehood:
                payload += make_record(rng.choice(KEYWORDS), rng.choice(VALUES))
            if rng.random() < falsehood:
                payload += rng.choice(RECORDS)
            payload = payload or b"9 a=bcde\n"
        header = make_header(rng, rng.choice((b"././@LongLink", b"PaxHeaders/x")), len(payload), kind)
        if rng.random() < falsehood / 4:
            falsify(header, rng)
        found += bytes(header) + pad(payload)
    return found


def falsify(header: bytearray, rng: random.Random) -> None:
    """Write a false value into a header, mostly with a right checksum."""
    start, stop = rng.choice(
        ((0, 100), (100, 108), (124, 136), (124, 136), (124, 136), (156, 157), (157, 257), (345, 500), (386, 512))
    )
    width = stop - start
    if width == 12 and rng.random() < 0.7:
        size = rng.choice(SIZES)
        header[start:stop] = encode_size(size) if rng.random() < 0.8 else b"%12d" % (size % 10**11)
    else:
        value = rng.choice(
            (b"", b"\xff" * width, b"9" * width, b" " * width, rng.choice(NAMES), b"-1", b"\x80" + b"\xff" * 11)
        )
        header[start:stop] = value[:width].ljust(width, b"\0")
    if header[156] in b"S" and rng.random() < 0.5:
        header[482] = 1  # More blocks with parts of the sparse file follow.
    if rng.random() < 0.9:
        fix_checksum(header)
