"""Random hostile tars: blocks whose fields have false values, extended headers of all kinds, and damaged bytes."""

from __future__ import annotations

import random
from collections.abc import Callable

from shardio.shards.tar import BLOCK, END

EXTENDED = b"xgXLK"

MAX_BYTES = 2**20

KINDS = b"0\x007125346xgXLKSDVMNAQ9\xff"

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

ENDS = (END, b"", bytes(BLOCK), bytes(10240), END + b"x" + bytes(511))

RECORDS = (b"0 a=b\n", b"5 a=b\n", b"99 a=b\n", b"7 a=bcd", b"7 abcd\n", b"x", b"9" * 30, b"-5 a=b\n")


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
    return content + bytes(-len(content) % BLOCK)


def make_record(keyword: bytes, value: bytes) -> bytes:
    """Return a record of a pax header. Its length includes the length itself."""
    rest = b" " + keyword + b"=" + value + b"\n"
    length = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
    return b"%d" % length + rest


def damage(content: bytearray, rng: random.Random) -> None:
    """Damage bytes once or a few times. Checksums are often corrected, or nearly all damage would end at them."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(EDITS)(content, rng)


def _offset(content: bytearray, rng: random.Random) -> int:
    return rng.randrange(len(content) + 1)


def _block(content: bytearray, rng: random.Random) -> int:
    return rng.randrange(len(content) // BLOCK + 1) * BLOCK


def _change_byte(content: bytearray, rng: random.Random) -> None:
    if not content:
        return
    offset = rng.randrange(len(content))
    content[offset] = rng.choice((content[offset] ^ (1 << rng.randrange(8)), rng.randrange(256), 0, 0x30, 0x80, 0xFF))
    start = offset - offset % BLOCK
    if start + BLOCK <= len(content) and content[start + 257 : start + 262] == b"ustar" and rng.random() < 0.8:
        fix_checksum(content, start)


def _delete(content: bytearray, rng: random.Random) -> None:
    start = _block(content, rng) if rng.random() < 0.5 else _offset(content, rng)
    del content[start : start + rng.choice((1, 2, 100, BLOCK, BLOCK, 3 * BLOCK))]


def _insert(content: bytearray, rng: random.Random) -> None:
    start = _block(content, rng) if rng.random() < 0.5 else _offset(content, rng)
    content[start:start] = bytes([rng.choice((0, 0x30, 0xFF))]) * rng.choice((1, 2, 100, BLOCK, BLOCK))


def _repeat(content: bytearray, rng: random.Random) -> None:
    start, target = _block(content, rng), _block(content, rng)
    content[target:target] = content[start : start + rng.choice((1, 2, 4)) * BLOCK] * rng.choice((1, 1, 2, 5))


def _cut(content: bytearray, rng: random.Random) -> None:
    del content[_offset(content, rng) if rng.random() < 0.5 else _block(content, rng) :]


def _append(content: bytearray, rng: random.Random) -> None:
    content += rng.choice((bytes(BLOCK), b"x", bytes(3 * BLOCK), b"x" * BLOCK, bytes(content[: 2 * BLOCK])))


Edit = Callable[[bytearray, random.Random], None]

EDITS: tuple[Edit, ...] = (_change_byte, _change_byte, _change_byte, _delete, _insert, _repeat, _cut, _cut, _append)


def _extend(rng: random.Random, kind: bytes, payload: bytes) -> bytes:
    header = make_header(rng, b"x", len(payload), kind[0])
    return bytes(header) + pad(payload) + bytes(make_header(rng, b"a.txt", 3)) + pad(b"abc") + END


def _size(rng: random.Random) -> int:
    return rng.choice((2**16, 2**18, 2**19, 2**20 - 4096))


def _digits(rng: random.Random) -> bytes:
    return _extend(rng, rng.choice((b"x", b"g")), make_record(b"comment", b"9" * _size(rng)))


def _sparse_digits(rng: random.Random) -> bytes:
    return _extend(rng, b"x", make_record(b"GNU.sparse.size", b"1") + make_record(b"comment", b"9" * _size(rng)))


def _broken_records(rng: random.Random) -> bytes:
    return _extend(rng, b"x", b"5 aaa" * (_size(rng) // 5 - 2) + b"=\n")


def _many_records(rng: random.Random) -> bytes:
    records = b"".join(make_record(b"%x" % i, b"") for i in range(_size(rng) // 24))
    return _extend(rng, rng.choice((b"x", b"g")), records)[: -len(END)] + _empty_members(rng)


def _empty_members(rng: random.Random) -> bytes:
    name = rng.choice((b"%d.txt", b"a.%d", b"%d.%%d", b"dir/%d", b"a.txt%d"))
    name = name if b"%%" not in name else b"%d.f"
    return b"".join(bytes(make_header(rng, name % i, 0)) for i in range(rng.choice((500, 1000, 1024)))) + END


def _fields_and_samples(rng: random.Random) -> bytes:
    names = (b"%d.%d" % (i, i % rng.choice((500, 1024))) for i in range(rng.choice((1000, 2000))))
    return b"".join(bytes(make_header(rng, name, 0)) for name in names) + END


def _long_name(rng: random.Random) -> bytes:
    size = _size(rng)
    part = rng.choice((b"/", b"a", b"a/", b".", b"./", b"_", b"/a.b", b"__"))
    name = (b"__" + b"_/" * (size // 2)) if part == b"__" else part * (size // len(part))
    if rng.random() < 0.5:
        return _extend(rng, b"L", name + b"\0")
    return _extend(rng, b"x", make_record(b"path", name))


def _chain(rng: random.Random) -> bytes:
    header = bytes(make_header(rng, b"x", 9, rng.choice(EXTENDED))) + pad(b"9 a=bcde\n")
    return header * rng.choice((60, 63, 64, 65, 1000)) + bytes(make_header(rng, b"a.txt", 3)) + pad(b"abc") + END


def _good(rng: random.Random) -> bytes:
    members = (bytes(make_header(rng, b"%d.txt" % i, 100)) + bytes(BLOCK) for i in range(900))
    return b"".join(members) + END


LARGE: tuple[Callable[[random.Random], bytes], ...] = (
    *(_digits, _sparse_digits, _broken_records, _many_records, _empty_members, _fields_and_samples),
    *(_long_name, _long_name, _chain, _good),
)
"""Makers of tars whose reading takes long if it is not linear in their size."""


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


def _make_content(rng: random.Random) -> bytes:
    return bytes([rng.randrange(256)]) * rng.choice((0, 1, 3, 100, 511, 512, 513, 1500))


def _make_name(rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return b"%d.%s" % (rng.randrange(9), rng.choice((b"txt", b"jpg", b"cls", b"seg.png")))
    return rng.choice(NAMES)


def _make_member(rng: random.Random, falsehood: float) -> bytes:
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


def _make_extended(rng: random.Random, name: bytes, num_bytes: int, falsehood: float) -> bytes:
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
