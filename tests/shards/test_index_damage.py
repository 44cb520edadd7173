"""Each way in which an index can be damaged: opening it raises an error that names the file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.sample import Sample
from shardio.shards import write_shard
from shardio.shards.index import read_columns
from shardio.storage import parse_location
from tests.files import count_open_files
from tests.tars import open_shard

Tensors = dict[str, NDArray[Any]]
Header = dict[str, Any]
Damage = Callable[[Tensors, Header], object]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A tar of two samples, with an index that a test damages."""
    samples = [Sample(key=key, fields={"jpg": key.encode() * 700, "cls": b"1"}, origin=key) for key in ("a", "bé")]
    write_shard(parse_location(tmp_path / "a.tar"), samples)
    return tmp_path / "a.tar"


def assert_refused(tar: Path) -> None:
    with pytest.raises(FormatError, match=r"a\.tar\.idx"):
        open_shard(tar)


def rewrite(tar: Path, damage: Damage) -> None:
    """Change the tensors or the header of an index, and write it again as safetensors does."""
    index = tar.with_name("a.tar.idx")
    tensors = {name: np.array(tensor) for name, tensor in safetensors.numpy.load_file(index).items()}
    with safetensors.safe_open(index, framework="numpy") as file:
        header = json.loads(file.metadata()["shardio"])
    damage(tensors, header)
    safetensors.numpy.save_file(tensors, index, {"shardio": json.dumps(header)})


def rewrite_layout(tar: Path, damage: Callable[[Header], object]) -> None:
    """Change the JSON header of an index, which tells where its tensors are."""
    index = tar.with_name("a.tar.idx")
    content = index.read_bytes()
    stop = 8 + int.from_bytes(content[:8], "little")
    layout = json.loads(content[8:stop])
    damage(layout)
    header = json.dumps(layout).encode()
    index.write_bytes(len(header).to_bytes(8, "little") + header + content[stop:])


def put(tensor: str, at: tuple[int, ...], value: int) -> Damage:
    return lambda tensors, _: tensors[tensor].__setitem__(at, value)


def cast(tensor: str, dtype: str) -> Damage:
    return lambda tensors, _: tensors.update({tensor: tensors[tensor].astype(dtype)})


def cut(tensor: str) -> Damage:
    return lambda tensors, _: tensors.update({tensor: np.ascontiguousarray(tensors[tensor][..., :-1])})


def say(name: str, value: object) -> Damage:
    return lambda _, header: header.update({name: value})


DAMAGES: dict[str, Damage] = {
    "offset-int32": cast("offset", "int32"),
    "size-uint64": cast("size", "uint64"),
    "hash-int64": cast("hash", "int64"),
    "key-stop-float": cast("key_stop", "float64"),
    "no-offset": lambda tensors, _: tensors.pop("offset"),
    "no-keys": lambda tensors, _: tensors.pop("key_bytes"),
    "offset-short": cut("offset"),
    "size-short": cut("size"),
    "hash-short": cut("hash"),
    "key-stop-short": cut("key_stop"),
    "key-bytes-short": cut("key_bytes"),
    "offset-beyond-the-tar": put("offset", (0, 1), 10**9),
    "size-beyond-the-tar": put("size", (0, 1), 10**9),
    "offset-huge": put("offset", (0, 0), sys.maxsize),
    "size-huge": put("size", (1, 0), sys.maxsize),
    "offset-negative": put("offset", (0, 0), -1),
    "size-negative": put("size", (0, 0), -7),
    "keys-go-back": put("key_stop", (0,), 9),
    "key-negative": put("key_stop", (0,), -1),
    "key-beyond-the-keys": put("key_stop", (1,), 1000),
    "format-newer": say("format", 3),
    "format-2-without-count": say("format", 2),
    "format-1-with-count": say("num_scattered", 0),
    "count-text": lambda _, header: header.update({"format": 2, "num_scattered": "0"}),
    "format-text": say("format", "one"),
    "fields-more": say("fields", ["cls", "jpg", "png"]),
    "fields-number": say("fields", 3),
    "fields-not-text": say("fields", [1, 2]),
    "samples-more": say("num_samples", 3),
    "samples-text": say("num_samples", "2"),
    "header-unknown": say("colour", "red"),
    "header-incomplete": lambda _, header: header.pop("digest"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_an_index_with_wrong_values_is_refused(shard: Path, damage: Damage) -> None:
    rewrite(shard, damage)
    assert_refused(shard)


def test_another_format_is_named_whatever_else_differs(shard: Path) -> None:
    rewrite(shard, lambda _, header: header.update({"format": 3, "colour": "red"}))
    with pytest.raises(FormatError, match="has format 3, but this version of shardio reads 1 and 2: use the version"):
        open_shard(shard)


def test_an_index_that_was_written_again_unchanged_is_read(shard: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    rewrite(shard, lambda *_: None)
    with open_shard(shard) as opened:
        assert [opened.index.key(i) for i in range(2)] == ["a", "bé"]


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 9, 100, 500, -1000, -100, -8, -1])
def test_a_truncated_index_is_refused(shard: Path, stop: int) -> None:
    index = shard.with_name("a.tar.idx")
    content = index.read_bytes()[:stop]
    assert len(content) < index.stat().st_size
    index.write_bytes(content)
    assert_refused(shard)


CONTENTS = {
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "text": b"this is not an index\n" * 9,
    "header-no-json": (4).to_bytes(8, "little") + b"{{{{",
    "header-a-list": (2).to_bytes(8, "little") + b"[]",
    "header-empty": (2).to_bytes(8, "little") + b"{}",
    "header-length-huge": b"\xff" * 8 + b"{}",
    "metadata-no-json": safetensors.numpy.save({"offset": np.zeros(1)}, {"shardio": "{"}),
    "metadata-of-another": safetensors.numpy.save({"weight": np.zeros(1)}, {"format": "pt"}),
    "no-metadata": safetensors.numpy.save({"weight": np.zeros(1)}),
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_another_file_than_an_index_is_refused(shard: Path, content: bytes) -> None:
    shard.with_name("a.tar.idx").write_bytes(content)
    assert_refused(shard)


def test_keys_whose_lengths_overflow_are_refused(shard: Path) -> None:
    """The bounds 3, -2**63, 0 differ by amounts that are positive in int64."""
    samples = [Sample(key=key, fields={"txt": b"1"}, origin=key) for key in ("abc", "d", "e", "f")]
    write_shard(parse_location(shard), samples)
    rewrite(shard, lambda tensors, _: tensors["key_stop"].__setitem__(slice(None), [3, -(2**63), -1, 6]))
    assert_refused(shard)
    with pytest.raises(FormatError, match="keys have negative lengths"):
        read_columns(parse_location(shard.with_name("a.tar.idx")))


@pytest.mark.parametrize("change", [{"shape": [], "data_offsets": [0, 1]}, {"shape": {}}, {"shape": [[]]}])
def test_keys_without_one_dimension_are_refused(shard: Path, change: Header) -> None:
    rewrite_layout(shard, lambda layout: layout["key_bytes"].update(change))
    assert_refused(shard)


@pytest.mark.parametrize("metadata", [5, None, [], {"format": 1}, True])
def test_metadata_that_is_no_string_is_refused(shard: Path, metadata: object) -> None:
    rewrite_layout(shard, lambda layout: layout["__metadata__"].update(shardio=metadata))
    assert_refused(shard)


@pytest.mark.parametrize(
    "offsets",
    [[0, 10**9], [-32, 0], [32, 0], [0, 31], [0], ["0", "32"], [0.0, 32.0], None],
    ids=["beyond", "negative", "reversed", "odd", "lone", "text", "float", "null"],
)
def test_tensors_outside_the_file_are_refused(shard: Path, offsets: object) -> None:
    rewrite_layout(shard, lambda layout: layout["offset"].update(data_offsets=offsets))
    assert_refused(shard)


def test_a_missing_index_is_refused(shard: Path) -> None:
    shard.with_name("a.tar.idx").unlink()
    assert_refused(shard)


def test_a_directory_instead_of_an_index_is_refused(shard: Path) -> None:
    shard.with_name("a.tar.idx").unlink()
    shard.with_name("a.tar.idx").mkdir()
    assert_refused(shard)


def test_a_refused_index_leaves_nothing_open(shard: Path) -> None:
    before = count_open_files()
    shard.with_name("a.tar.idx").write_bytes(CONTENTS["zeros"])
    assert_refused(shard)
    assert count_open_files() == before
