"""Random hostile shards: a tar, compressed or not, or a tar with an index."""

from __future__ import annotations

import gzip
import json
import random
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardio.shards.shard import write_index
from shardio.shards.sources import TarContents, scan_contents
from shardio.shards.tar import END
from tests.memory_store import MemoryStore
from tests.shards.hostile_indexes import make_index
from tests.shards.hostile_tars import make_tar
from tests.shards.tar_blocks import make_header, pad
from tests.shards.tar_damage import damage

WEIGHTS = (4, 8, 8, 1, 8, 4)
"""How often each of the good shards is used: rarely the large one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostileShard:
    """Files to read.

    Attributes:
        tar: The tar.
        index: Its index; None if it is to be indexed.
        is_compressed: Whether gzip compressed the tar.
    """

    tar: bytes
    index: bytes | None = None
    is_compressed: bool = False

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes."""
        return len(self.tar) + len(self.index or b"")

    def dump(self) -> bytes:
        """Return the files as one: a letter, the size of the tar in 4 bytes, the tar and the index."""
        kind = (
            (b"T" if self.index is None else b"I") if not self.is_compressed else b"Z" if self.index is None else b"J"
        )
        return kind + len(self.tar).to_bytes(4, "little") + self.tar + (self.index or b"")

    @staticmethod
    def load(content: bytes) -> HostileShard:
        """Return the files in a content. Every content is valid."""
        kind, size = content[:1], int.from_bytes(content[1:5], "little")
        tar, index = content[5 : 5 + size], content[5 + size :]
        return HostileShard(tar=tar, index=index if kind in b"IJ" else None, is_compressed=kind in b"ZJ")


def make_shard(rng: random.Random) -> HostileShard:
    """Return random files."""
    kind = rng.random()
    if kind < 0.65:
        return HostileShard(tar=make_tar(rng))
    if kind < 0.7:
        decompressed = make_tar(rng) if rng.random() < 0.7 else rng.choices(good_shards(), WEIGHTS)[0][0]
        compressed = bytearray(gzip.compress(decompressed, 1, mtime=0))
        if rng.random() < 0.5:
            damage(compressed, rng)
        return HostileShard(tar=bytes(compressed), is_compressed=True)
    tar, index = rng.choices(good_shards(), WEIGHTS)[0]
    if kind < 0.73:
        return HostileShard(tar=gzip.compress(tar, 1, mtime=0), index=make_index(_mark(index), rng), is_compressed=True)
    if kind < 0.8:
        changed = bytearray(tar)
        damage(changed, rng)
        return HostileShard(tar=bytes(changed), index=fit(index, len(changed)))
    return HostileShard(tar=tar, index=make_index(index, rng))


@cache
def good_shards() -> tuple[tuple[bytes, bytes], ...]:
    """Return some tars with their indexes."""
    rng, found = random.Random(1), list[tuple[bytes, bytes]]()
    lists = (
        ["a.txt"],
        ["a.jpg", "a.cls", "b.jpg", "b.cls", "dir/c.cls"],
        [f"{i}.{field}" for i in range(3) for field in ("cls", "jpg", "json")],
        [f"{i:04d}.txt" for i in range(600)],
        ["bé.txt", "x.JPG", "README", "y.seg.png"],
        ["empty.txt"],
    )
    for names in lists:
        tar = b"".join(bytes(make_header(rng, name.encode(), len(name) * 7)) + pad(name.encode() * 7) for name in names)
        store = MemoryStore({"a.tar": tar + END})
        write_index_of(store)
        found.append((store.objects["a.tar"], store.objects["a.tar.idx"]))
    return tuple(found)


def write_index_of(store: MemoryStore) -> TarContents:
    """Index the tar of a store; return what it contains."""
    with closing(store.open("a.tar")) as file:
        contents = scan_contents(file)
        write_index(store.at("a.tar.idx"), file, contents.samples, contents.digest)
    return contents


def _mark(index: bytes) -> bytes:
    """Return the index of a compressed tar."""
    return change_metadata(index, {"compression": "gzip"})


def fit(index: bytes, num_bytes: int) -> bytes:
    """Return an index for a tar of another size."""
    return change_metadata(index, {"num_bytes": num_bytes})


def change_metadata(index: bytes, values: dict[str, Any]) -> bytes:
    """Return an index with other values in its own metadata."""
    start = 8 + int.from_bytes(index[:8], "little")
    layout = json.loads(index[8:start])
    layout["__metadata__"]["shardio"] = json.dumps({**json.loads(layout["__metadata__"]["shardio"]), **values})
    header = json.dumps(layout).encode()
    return len(header).to_bytes(8, "little") + header + index[start:]
