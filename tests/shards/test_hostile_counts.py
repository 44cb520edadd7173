"""Manifests and indexes with impossible counts: refused at opening, before any memory of that size is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from shardio.errors import FormatError, SampleError
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import Manifest, open_table, write_manifest, write_shard
from shardio.storage import parse_location
from tests.tars import open_shard


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """Two shards with their manifest; the first is the larger one."""
    shards = []
    for name, keys in (("a.tar", "AbcD"), ("b.tar", "ef")):
        samples = [Sample(key=key, fields={"cls": b"1", "txt": key.encode() * 30}, origin=key) for key in keys]
        shards.append(write_shard(parse_location(tmp_path / name), samples)[0])
    write_manifest(parse_location(tmp_path / "shardio.json"), Manifest(shards=tuple(shards), fields=("cls", "txt")))
    return tmp_path


def rewrite(packed: Path, number: int, **values: object) -> None:
    path = packed / "shardio.json"
    manifest: dict[str, Any] = json.loads(path.read_bytes())
    manifest["shards"][number].update(values)
    path.write_text(json.dumps(manifest))


def read_all(packed: Path) -> list[tuple[str, dict[str, bytes]]]:
    table = open_table(packed)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), table.manifest.fields)
    return [(sample.key, dict(sample.fields)) for sample in samples]


HOSTILE: dict[str, tuple[int, dict[str, object]]] = {
    "samples-huge": (0, {"num_samples": 2**62}),
    "samples-beyond-int64": (1, {"num_samples": 10**30}),
    "samples-and-bytes-huge": (0, {"num_samples": 2**50, "num_bytes": 2**62}),
    "bytes-beyond-int64": (1, {"num_bytes": 2**70}),
    "bytes-more": (0, {"num_bytes": 2**20}),
    "name-with-nul": (0, {"name": "a\0.tar"}),
    "name-with-lone-surrogate": (0, {"name": "a\ud800.tar"}),
}


@pytest.mark.parametrize(("number", "values"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_with_impossible_counts_is_refused(packed: Path, number: int, values: dict[str, object]) -> None:
    rewrite(packed, number, **values)
    with pytest.raises(FormatError, match=r"shardio\.json"):
        open_table(packed)


@pytest.mark.parametrize("content", [b"[" * 100_000 + b"]" * 100_000, b'{"format": 1, "shards": [], "shards": []}'])
def test_a_deeply_nested_or_ambiguous_manifest_is_refused(packed: Path, content: bytes) -> None:
    (packed / "shardio.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"shardio\.json cannot be read"):
        open_table(packed)


def test_a_deeply_nested_index_is_refused(packed: Path) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    (packed / "a.tar.idx").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(FormatError, match=r"a\.tar\.idx is damaged, or is not a shardio index"):
        open_shard(packed / "a.tar")


def test_an_index_of_more_samples_than_fit_the_tar_is_refused(packed: Path) -> None:
    """Its tensors fit its header, and its file is sparse."""
    number, path = 2**33, packed / "a.tar.idx"
    with safetensors.safe_open(path, framework="numpy") as file:
        header = {**json.loads(file.metadata()["shardio"]), "num_samples": number}
    shapes = {"offset": [2, number], "size": [2, number], "hash": [2, number], "key_stop": [number], "key_bytes": [9]}
    dtypes = {"hash": "U64", "key_bytes": "U8"}
    layout, begin = dict[str, Any](__metadata__={"shardio": json.dumps(header)}), 0
    for name, shape in shapes.items():
        stop = begin + int(np.prod(shape)) * (1 if name == "key_bytes" else 8)
        layout[name] = {"dtype": dtypes.get(name, "I64"), "shape": shape, "data_offsets": [begin, stop]}
        begin = stop
    content = json.dumps(layout).encode()
    with path.open("wb") as out:
        out.write(len(content).to_bytes(8, "little") + content)
        out.truncate(out.tell() + begin)
    with pytest.raises(FormatError, match=rf"index .*a\.tar\.idx has {number} samples .* more than .*a\.tar can hold"):
        open_shard(packed / "a.tar")


def test_no_flipped_bit_of_an_index_silently_changes_what_is_read(packed: Path) -> None:
    """Keys are short and in ASCII: a plain tar header does not hold other keys completely."""
    path, expected = packed / "a.tar.idx", read_all(packed)
    content, changed = path.read_bytes(), list[int]()
    for offset in range(len(content)):
        flipped = bytearray(content)
        flipped[offset] ^= 1 << (5 if chr(content[offset]).isalpha() else offset % 8)  # The case of letters, too.
        path.write_bytes(flipped)
        try:
            found = read_all(packed)
        except (FormatError, SampleError):
            continue
        if found != expected:
            changed.append(offset)
    assert changed == []
    path.write_bytes(content)
    assert read_all(packed) == expected
