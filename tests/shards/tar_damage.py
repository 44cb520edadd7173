"""Random damage to the bytes and blocks of a file."""

from __future__ import annotations

import random
from collections.abc import Callable

from shardio.shards.tar import BLOCK
from tests.shards.tar_blocks import fix_checksum


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
