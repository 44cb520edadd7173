"""Random hostile tars and shards, which have incorrect headers, incorrect values in indexes, or damaged bytes."""

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

from shardio.shards.indexing import TarContents, scan_contents
from shardio.shards.shard import write_index
from shardio.shards.tar import BLOCK, END
from tests.memory_store import MemoryStore
from tests.tars import change_metadata

EXTENDED = b"xgXLK"
MAX_BYTES = 2**20
KINDS = b"0\x007125346xgXLKSDVMNAQ9\xff"

SIZES = (-(2**94), -(2**63), -(2**31), -513, -512, -1, 1, 511, 513, 4096, 2**20, 2**31 + 1, 8**11, 2**62, 2**63, 2**93)
"""False sizes. Sizes that octal digits cannot express are written in base 256."""

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

RECORD_VALUES = (
    *b"0 1 -1 3 512 1024 2 1e999 nan -inf abc BINARY 1,2,3 0,1 1.5 0x10 1_0 = \0".split(),
    *(b"", b"9" * 30, b"9" * 5000, b"\xff\xff", b"x\ny=z", b" 7 ", b"\xd9\xa3", b"\n"),
)

ENDS = (END, b"", bytes(BLOCK), bytes(10240), END + b"x" + bytes(511))
RECORDS = (b"0 a=b\n", b"5 a=b\n", b"99 a=b\n", b"7 a=bcd", b"7 abcd\n", b"x", b"9" * 30, b"-5 a=b\n")


def make_header(rng: random.Random, name: bytes, num_bytes: int, kind: int = 0x30) -> bytearray:
    """Return a header of one block with a correct checksum, in one of the usual formats."""
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
    """Write the correct checksum into the header at an offset."""
    block[offset + 148 : offset + 156] = b" " * 8
    block[offset + 148 : offset + 156] = b"%06o\0 " % sum(block[offset : offset + BLOCK])
    return block


def pad(content: bytes) -> bytes:
    return content + bytes(-len(content) % BLOCK)


def make_record(keyword: bytes, value: bytes) -> bytes:
    """Return a record of a pax header. It begins with its length, which includes the digits of the length itself."""
    rest = b" " + keyword + b"=" + value + b"\n"
    length = next(n for n in range(len(rest), len(rest) + 9) if len(str(n)) + len(rest) == n)
    return b"%d" % length + rest


def damage(content: bytearray, rng: random.Random) -> None:
    """Damage bytes once or a few times, and often fix the checksums, which would otherwise reveal most damage."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(EDITS)(content, rng)


def _block(content: bytearray, rng: random.Random) -> int:
    return rng.randrange(len(content) // BLOCK + 1) * BLOCK


def _offset(content: bytearray, rng: random.Random) -> int:
    return rng.randrange(len(content) + 1) if rng.random() < 0.5 else _block(content, rng)


def _change_byte(content: bytearray, rng: random.Random) -> None:
    if not content:
        return
    offset = rng.randrange(len(content))
    content[offset] = rng.choice((content[offset] ^ (1 << rng.randrange(8)), rng.randrange(256), 0, 0x30, 0x80, 0xFF))
    start = offset - offset % BLOCK
    if start + BLOCK <= len(content) and content[start + 257 : start + 262] == b"ustar" and rng.random() < 0.8:
        fix_checksum(content, start)


def _delete(content: bytearray, rng: random.Random) -> None:
    start = _offset(content, rng)
    del content[start : start + rng.choice((1, 2, 100, BLOCK, BLOCK, 3 * BLOCK))]


def _insert(content: bytearray, rng: random.Random) -> None:
    start = _offset(content, rng)
    content[start:start] = bytes([rng.choice((0, 0x30, 0xFF))]) * rng.choice((1, 2, 100, BLOCK, BLOCK))


def _repeat(content: bytearray, rng: random.Random) -> None:
    start, target = _block(content, rng), _block(content, rng)
    content[target:target] = content[start : start + rng.choice((1, 2, 4)) * BLOCK] * rng.choice((1, 1, 2, 5))


def _cut(content: bytearray, rng: random.Random) -> None:
    del content[_offset(content, rng) :]


def _append(content: bytearray, rng: random.Random) -> None:
    content += rng.choice((bytes(BLOCK), b"x", bytes(3 * BLOCK), b"x" * BLOCK, bytes(content[: 2 * BLOCK])))


Edit = Callable[[bytearray, random.Random], None]
EDITS: tuple[Edit, ...] = (_change_byte, _change_byte, _change_byte, _delete, _insert, _repeat, _cut, _cut, _append)


def _make_large_tar(rng: random.Random) -> bytes:
    """Return a tar that takes a very long time to read if the reader's algorithm is not linear in the tar's size."""
    size = rng.choice((2**16, 2**18, 2**19, 2**20 - 4096))
    digits = make_record(b"comment", b"9" * size)
    many_records = b"".join(make_record(b"%x" % i, b"") for i in range(size // 24))
    long_name = rng.choice((b"/", b"a", b"a/", b".", b"./", b"_", b"_/", b"/a.b")) * (size // 4)
    payloads = (
        digits,
        make_record(b"GNU.sparse.size", b"1") + digits,
        b"5 aaa" * (size // 5 - 2) + b"=\n",
        many_records,
    )
    payload = rng.choice((*payloads, make_record(b"path", long_name), make_record(b"path", b"__" + long_name)))
    kind = rng.choice(b"xgL")
    payload = long_name + b"\0" if kind in b"L" else payload
    extended = bytes(make_header(rng, b"x", len(payload), kind)) + pad(payload)
    short = bytes(make_header(rng, b"x", 9, rng.choice(EXTENDED))) + pad(b"9 a=bcde\n")
    heads = rng.choice((extended, extended, short * rng.choice((60, 63, 64, 65, 1000)), b""))
    name = rng.choice((b"%d.txt", b"a.%d", b"dir/%d", b"a.txt%d", b"%d.f"))
    num_members = 1 if heads and rng.random() < 0.8 else rng.choice((500, 1000, 1024, 2000))
    names = [name % i if rng.random() < 0.9 else b"%d.%d" % (i, i % 1024) for i in range(num_members)]
    return heads + b"".join(bytes(make_header(rng, each, 0)) for each in names) + END


def make_tar(rng: random.Random) -> bytes:
    """Return a tar: usually a small one with some incorrect headers, rarely a large one."""
    if rng.random() < 0.0005:
        tar = bytearray(_make_large_tar(rng))
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
                payload += make_record(rng.choice(KEYWORDS), rng.choice(RECORD_VALUES))
            if rng.random() < falsehood:
                payload += rng.choice(RECORDS)
            payload = payload or b"9 a=bcde\n"
        header = make_header(rng, rng.choice((b"././@LongLink", b"PaxHeaders/x")), len(payload), kind)
        if rng.random() < falsehood / 4:
            falsify(header, rng)
        found += bytes(header) + pad(payload)
    return found


def falsify(header: bytearray, rng: random.Random) -> None:
    """Write an incorrect value into a header, usually with a correct checksum."""
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
        header[482] = 1  # This flag says that the sparse file's description continues in another block.
    if rng.random() < 0.9:
        fix_checksum(header)


WEIGHTS = (4, 8, 8, 1, 8, 4)
"""The relative frequencies of the good shards. The large shard is rare."""

NUMBERS = (-(2**63), -(2**62), -513, -512, -2, -1, 0, 1, 2, 7, 511, 512, 513, 1024, 4096, 2**31, 2**62, 2**63 - 1)

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 512, 2**31, 2**53, 2**63 - 1, 2**64, 10**30, -(2**63), 1.0, 1e308, "", "a"),
    *("1", "I64", "U8", "F32", "gzip", "\ud800", "\udcff", "é", "\0", [], {}, [[]], [1], ["a", "a"], [0, 1]),
    *([2**62, 2**62], {"a": 1}, "x" * 5000, [0] * 3000, {"shardio": "{}"}),
)
"""Values for any entry of a header. Each use copies the value, because a header may be changed several times."""

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
    """A tar, perhaps compressed with gzip, and its index, or None if the index has yet to be created."""

    tar: bytes
    index: bytes | None = None
    is_compressed: bool = False

    @property
    def num_bytes(self) -> int:
        """The total size of the files in bytes."""
        return len(self.tar) + len(self.index or b"")

    def dump(self) -> bytes:
        """Join the files: a letter, the size of the tar in 4 bytes, the tar and the index."""
        kind = b"TIZJ"[2 * self.is_compressed + (self.index is not None) :][:1]
        return kind + len(self.tar).to_bytes(4, "little") + self.tar + (self.index or b"")

    @staticmethod
    def load(content: bytes) -> HostileShard:
        """Split joined files. Any bytes are valid."""
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
    """Return an index with incorrect values."""
    start = 8 + int.from_bytes(index[:8], "little")
    if rng.random() < 0.02:
        return _join(rng.choice(TEXTS), index[start:])
    if rng.random() < 0.0005:
        return _make_large_index(rng)
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
    """Set one element or several adjacent elements of a tensor."""
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
    """Set, add or remove a value of the index's metadata, or change a number slightly."""
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
    """Make a tensor refer to the bytes of another tensor."""
    name, other = rng.choice([*layout]), rng.choice([*layout])
    if isinstance(layout[name], dict) and isinstance(layout[other], dict) and "data_offsets" in layout[other]:
        layout[name]["data_offsets"] = layout[other]["data_offsets"]


def _make_large_index(rng: random.Random) -> bytes:
    """Return an index that takes a very long time to read if the reader's algorithm is not linear in its size."""
    number = rng.choice((1000, 10_000, 100_000))
    names = ",".join(f'"{i:x}":0' for i in range(number))
    item = rng.choice((b"[],", b"{},", b"0,", b'"",', b"1.5,", b"9" * 400 + b","))
    text = rng.choice((b"\\ud800", b"x", b"\\", "é".encode(), b"\\u00"))
    nested = rng.choice((b"[" * number + b"]" * number, b'{"a":' * number, b"[{" * number, b"[" * number))
    headers = (b'{%s,"0":0}' % names.encode(), b"[" + item * number + b"0]", b'"' + text * number + b'"', nested)
    return _join(rng.choice(headers), b"")[:MAX_BYTES] if rng.random() < 0.8 else _make_index_of_many_fields(rng)


def _make_index_of_many_fields(rng: random.Random) -> bytes:
    """Return an index of one sample and many fields, all of which the sample lacks."""
    number, num_bytes = rng.choice((1000, 10_000)), rng.choice((0, 1024, 4096))
    values = {"format": 1, "fields": ["a"] * number, "num_samples": 1, "num_bytes": num_bytes}
    layout: Layout = {"__metadata__": {"shardio": json.dumps({**values, "digest": "", "header_digest": ""})}}
    for name, dtype in (("offset", "I64"), ("size", "I64"), ("hash", "U64")):
        layout[name] = {"dtype": dtype, "shape": [number, 1], "data_offsets": [0, 8 * number]}
    layout["key_stop"] = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}
    layout["key_bytes"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return _join(json.dumps(layout).encode(), b"\xff" * (8 * number))
