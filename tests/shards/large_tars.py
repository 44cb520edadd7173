"""Tars that take long to read if reading is not linear in their size."""

from __future__ import annotations

import random
from collections.abc import Callable

from shardio.shards.tar import BLOCK, END
from tests.shards.tar_blocks import EXTENDED, make_header, make_record, pad


def _extend(rng: random.Random, kind: bytes, payload: bytes) -> bytes:
    """Return a tar of one member with a large extended header."""
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
