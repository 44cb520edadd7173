"""Random hostile shards: a tar, compressed or not, or a tar with an index.

Hostile indexes are valid ones whose header or tensors have false values, or whose bytes are damaged.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardio.shards.shard import write_index
from shardio.shards.sources import TarContents, scan_contents
from shardio.shards.tar import END
from tests.memory_store import MemoryStore
from tests.shards.hostile_tars import damage, make_header, make_tar, pad
from tests.tars import change_metadata

WEIGHTS = (4, 8, 8, 1, 8, 4)
"""How often each of the good shards is used: rarely the large one."""

NUMBERS = (-(2**63), -(2**62), -513, -512, -2, -1, 0, 1, 2, 7, 511, 512, 513, 1024, 4096, 2**31, 2**62, 2**63 - 1)

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 512, 2**31, 2**53, 2**63 - 1, 2**64, 10**30, -(2**63), 1.0, 1e308, "", "a"),
    *("1", "I64", "U8", "F32", "gzip", "\ud800", "\udcff", "é", "\0", [], {}, [[]], [1], ["a", "a"], [0, 1]),
    *([2**62, 2**62], {"a": 1}, "x" * 5000, [0] * 3000, {"shardio": "{}"}),
)
"""Values for anything in a header. They are copied, because one header is changed several times."""

TEXTS = (
    *(b"[" * 5000, b"[" * 5000 + b"]" * 5000, b'{"a":' * 5000, b"{}", b"[]", b"null", b"1", b'""', b"\xff\xfe", b"NaN"),
    *(b'{"__metadata__":null}', b'{"__metadata__":{"shardio":5}}', b'{"__metadata__":{"shardio":null}}', b"1" * 5000),
    *(b'{"a":1,"a":2}', b'{"__metadata__":{"shardio":"1"}}', b'{"__metadata__":{"shardio":"{}"}}', b"\xef\xbb\xbf{}"),
    *(b" ", b'{"__metadata__":{"shardio":"' + b"[" * 3000 + b'"}}'),
)

Layout = dict[str, Any]

AGREEING: tuple[Layout, ...] = ({"shape": [], "data_offsets": [0, 1]}, {"shape": [0], "data_offsets": [0, 0]})


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
        kind = b"TIZJ"[2 * self.is_compressed + (self.index is not None) :][:1]
        return kind + len(self.tar).to_bytes(4, "little") + self.tar + (self.index or b"")

    @staticmethod
    def load(content: bytes) -> HostileShard:
        """Return the files in a content. Every content is valid."""
        kind, size = content[:1], int.from_bytes(content[1:5], "little")
        tar, index = content[5 : 5 + size], content[5 + size :]
        return HostileShard(tar=tar, index=index if kind in b"IJ" else None, is_compressed=kind in b"ZJ")


def make_shard(rng: random.Random) -> HostileShard:
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
        return HostileShard(
            tar=gzip.compress(tar, 1, mtime=0),
            index=make_index(change_metadata(index, lambda values: values.update(compression="gzip")), rng),
            is_compressed=True,
        )
    if kind < 0.8:
        changed = bytearray(tar)
        damage(changed, rng)
        return HostileShard(tar=bytes(changed), index=fit(index, len(changed)))
    return HostileShard(tar=tar, index=make_index(index, rng))


@cache
def good_shards() -> tuple[tuple[bytes, bytes], ...]:
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
    with closing(store.open("a.tar")) as file:
        contents = scan_contents(file)
        write_index(store.at("a.tar.idx"), file, contents.samples, contents.digest)
    return contents


def fit(index: bytes, num_bytes: int) -> bytes:
    return change_metadata(index, lambda values: values.update(num_bytes=num_bytes))


def make_index(index: bytes, rng: random.Random) -> bytes:
    """Return an index made false.

    Args:
        index: An index.
        rng: Makes all choices.
    """
    start = 8 + int.from_bytes(index[:8], "little")
    if rng.random() < 0.02:
        return _join(rng.choice(TEXTS), index[start:])
    if rng.random() < 0.0005:
        return rng.choice(LARGE)(rng)
    data = bytearray(index[start:])
    layout: dict[str, Any] = json.loads(index[8:start])
    values: dict[str, Any] = json.loads(layout["__metadata__"]["shardio"])
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice((_set_number, _set_number, _set_number, _set_value, _set_tensor, _alias))(layout, values, data, rng)
    if isinstance(layout.get("__metadata__"), dict):
        layout["__metadata__"].setdefault("shardio", json.dumps(values))
    found = bytearray(_join(json.dumps(layout).encode(), bytes(data)))
    if rng.random() < 0.15:
        damage(found, rng)
    if rng.random() < 0.05:
        found[:8] = (rng.choice(NUMBERS) % 2**64).to_bytes(8, "little")
    return bytes(found)


def _join(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _set_number(layout: Layout, values: Layout, data: bytearray, rng: random.Random) -> None:
    """Set one or some neighbouring elements of a tensor."""
    if len(data) < 8:
        return
    tensors = [name for name in layout if isinstance(layout[name], dict) and name not in ("__metadata__", "key_bytes")]
    name = rng.choice(tensors) if tensors else ""
    bounds = layout.get(name, {}).get("data_offsets")
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(type(each) is int for each in bounds):
        return
    start, stop = max(0, min(bounds[0], len(data) - 8)), max(8, min(bounds[1], len(data)))
    at = start + 8 * rng.randrange(max(1, (stop - start) // 8))
    for i in range(rng.choice((1, 1, 2, 3))):
        here = at + 8 * i
        if here + 8 <= len(data):
            now = int.from_bytes(data[here : here + 8], "little", signed=True)
            value = rng.choice((now + rng.choice((-512, -1, 1, 512)), rng.choice(NUMBERS)))
            data[here : here + 8] = (value % 2**64).to_bytes(8, "little")


def _set_value(layout: Layout, values: Layout, data: bytearray, rng: random.Random) -> None:
    """Set, add or remove a value of the index's own metadata, or make a small change to a number."""
    name = rng.choice((*values, "version", "compression", "mtime_ns", "inode", "other"))
    if rng.random() < 0.1:
        values.pop(name, None)
    elif type(values.get(name)) is int and rng.random() < 0.5:
        values[name] += rng.choice((-1, 1, 512))
    elif name == "fields" and rng.random() < 0.7:
        fields = list(values["fields"]) if isinstance(values["fields"], list) else []
        rng.shuffle(fields)
        values[name] = [*fields, *rng.choice(([], ["txt"], [""], ["\ud800"], ["\udcff"], [1]))][
            : rng.choice((1, 2, 3, 9))
        ]
    else:
        values[name] = deepcopy(rng.choice(VALUES))
    if isinstance(layout.get("__metadata__"), dict):
        layout["__metadata__"] = {"shardio": json.dumps(values)}


def _set_tensor(layout: Layout, values: Layout, data: bytearray, rng: random.Random) -> None:
    name = rng.choice((*layout, "other"))
    if rng.random() < 0.2:
        layout[name] = deepcopy(rng.choice(VALUES))
    elif isinstance(layout.get(name), dict) and name != "__metadata__":
        part = rng.choice(("dtype", "shape", "data_offsets"))
        old = layout[name].get(part)
        if isinstance(old, list) and old and rng.random() < 0.6:
            changed = [*old]
            i = rng.randrange(len(changed))
            changed[i] = rng.choice(
                (changed[i] if type(changed[i]) is not int else changed[i] + 8, deepcopy(rng.choice(VALUES)))
            )
            layout[name][part] = changed if rng.random() < 0.8 else changed[:1]
        else:
            layout[name][part] = deepcopy(rng.choice(VALUES))
        if rng.random() < 0.3:
            layout[name].update(rng.choice(AGREEING))


def _alias(layout: Layout, values: Layout, data: bytearray, rng: random.Random) -> None:
    """Let a tensor have the bytes of another one."""
    name, other = rng.choice([*layout]), rng.choice([*layout])
    if isinstance(layout[name], dict) and isinstance(layout[other], dict) and "data_offsets" in layout[other]:
        layout[name]["data_offsets"] = layout[other]["data_offsets"]


def _many_names(rng: random.Random) -> bytes:
    """Return an object of many names, of which the last occurs twice."""
    names = [f'"{i:x}":0' for i in range(rng.choice((10_000, 100_000)))]
    return _join(("{" + ",".join([*names, names[-1]]) + "}").encode(), b"")


def _many_fields(rng: random.Random) -> bytes:
    """Return an index of one sample and many fields, all of them missing."""
    num_fields = rng.choice((1000, 10_000))
    num_bytes = rng.choice((0, 1024, 4096))
    values = {"format": 1, "fields": ["a"] * num_fields, "num_samples": 1, "num_bytes": num_bytes}
    values |= {"digest": "", "header_digest": ""}
    layout: Layout = {"__metadata__": {"shardio": json.dumps(values)}}
    for name, dtype in (("offset", "I64"), ("size", "I64"), ("hash", "U64")):
        layout[name] = {"dtype": dtype, "shape": [num_fields, 1], "data_offsets": [0, 8 * num_fields]}
    layout["key_stop"] = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
    layout["key_bytes"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return _join(json.dumps(layout).encode(), b"\xff" * (8 * num_fields))


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice((900, 10_000, 300_000))
    return _join(rng.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth, b"[{" * depth, b"[" * depth)), b"")


def _many_lists(rng: random.Random) -> bytes:
    return _join(
        b"[" + rng.choice((b"[],", b"{},", b"0,", b'"",', b"1.5,", b"9" * 4000 + b",")) * 200_000 + b"0]", b""
    )[: 2**20]


def _text(rng: random.Random) -> bytes:
    return _join(b'"' + rng.choice((b"\\ud800", b"x", b"\\", "é".encode(), b"\\u00")) * 150_000 + b'"', b"")


LARGE: tuple[Callable[[random.Random], bytes], ...] = (_many_names, _many_fields, _deep, _many_lists, _text)
"""Makers of indexes whose reading takes long if it is not linear in their size."""
