"""Indexes of shards: their contents, and every way in which an index can be stale, damaged or hostile."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from shardio.errors import FormatError, SampleError, StaleIndexError
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import Manifest, open_table, read_shards, repair, shard_index, write_manifest, write_shard
from shardio.shards.index import read_columns
from shardio.storage import parse_location
from tests.files import find_open_files
from tests.raising import assert_raises
from tests.tars import change_layout, index_of, open_shard, read_members, read_metadata

KEYS = st.text(st.characters(exclude_categories=["C"], exclude_characters="/."), min_size=1, max_size=120)
CONTENTS = st.dictionaries(st.sampled_from(["jpg", "cls", "json", "seg.png"]), st.binary(max_size=600), min_size=1)
SAMPLES = st.dictionaries(KEYS, CONTENTS, min_size=1, max_size=6)


@pytest.fixture(params=[shard_index.MAX_KEPT, 0], ids=["in memory", "sample by sample"], autouse=True)
def _max_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Read indexes both from memory and sample by sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_index, "MAX_KEPT", request.param)
        yield


def write(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    write_shard(parse_location(path), [Sample(key=key, fields=fields, origin=key) for key, fields in samples.items()])


@given(SAMPLES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_written_is_read_in_the_requested_order(tmp_path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    write(tmp_path / "a.tar", samples)
    with open_shard(tmp_path / "a.tar") as shard:
        fields = shard.index.header.fields
        for names in (fields, fields[::-1], ("other", *fields)):
            columns = read_shards([(shard, np.arange(len(samples)))], names)
            assert columns == [[contents.get(name) for contents in samples.values()] for name in names]
        assert shard.index.keys(np.arange(shard.index.header.num_samples)) == [*samples]
        starts, stops, _ = shard.index.locate(np.arange(len(samples)), ("other", *fields))
        expected = [[name in contents for name in ("other", *fields)] for contents in samples.values()]
        assert (starts >= 0).tolist() == (stops >= 0).tolist() == expected


def test_an_index_is_a_plain_safetensors_file(packed: Path) -> None:
    path = packed / "shard-000000.tar"
    members = read_members(path)
    with safetensors.safe_open(index_of(path), framework="numpy") as file:
        header = json.loads(file.metadata()["shardio"])
        offset, size, key_stop = (file.get_tensor(name) for name in ("offset", "size", "key_stop"))
        keys = file.get_tensor("key_bytes").tobytes()
        hashes = file.get_tensor("hash").T.ravel().tolist()
        assert set(file.keys()) == {"offset", "size", "hash", "key_stop", "key_bytes"}
        assert list(file.metadata()) == ["shardio"]
    assert (header["fields"], header["num_samples"], len(key_stop)) == (["cls", "jpg"], len(members) // 2, 5)
    names = [f"{keys[start:stop].decode()}.{field}" for start, stop in zip([0, *key_stop], key_stop, strict=False)
             for field in header["fields"]]  # fmt: skip
    assert names == [name for name, _ in members]
    whole = path.read_bytes()
    ranges = zip(offset.T.ravel(), size.T.ravel(), strict=True)
    assert [whole[start : start + length] for start, length in ranges] == [content for _, content in members]
    assert hashes == [xxhash.xxh3_64_intdigest(content) for _, content in members]
    assert (header["num_bytes"], header["digest"]) == (len(whole), xxhash.xxh3_128_hexdigest(whole))


@pytest.mark.parametrize("fails", [False, True])
def test_a_shard_appears_once_all_its_samples_are_written(tmp_path: Path, fails: bool) -> None:
    def samples() -> Iterator[Sample]:
        for key in "ab":
            assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
            yield Sample(key=key, fields={"jpg": b"1"}, origin=key)
        if fails:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more") if fails else nullcontext():
        write_shard(parse_location(tmp_path / "a.tar"), samples())
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if fails else ["a.tar", "a.tar.idx"])


def test_an_open_shard_holds_descriptors_and_a_closed_one_none(packed: Path) -> None:
    path, before = packed / "shard-000000.tar", find_open_files()
    with open_shard(path):
        # The index file is closed if its content is in memory.
        assert len(find_open_files() - before) == (1 if shard_index.MAX_KEPT else 2)
    assert find_open_files() <= before


@pytest.mark.parametrize("change", ["appended", "truncated", "zbc", "abz"])
def test_the_index_of_a_changed_tar_is_stale(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.tar"
    write(path, {key: {"jpg": b"1" * 600} for key in "abc"})
    size = path.stat().st_size
    if change == "appended":
        with tarfile.open(path, "a") as tar:
            tar.addfile(tarfile.TarInfo("d.jpg"))
    elif change == "truncated":
        os.truncate(path, 1024)
    else:
        write(tmp_path / "b.tar", {key: {"jpg": b"1" * 600} for key in change})
        (tmp_path / "b.tar").replace(path)
        assert path.stat().st_size == size
    message = r"a\.tar\.idx.*a\.tar has changed.*rebuild the index \(shardio repair .*delete"
    assert_raises(StaleIndexError, message, open_shard, path)


Tensors = dict[str, NDArray[Any]]
Header = dict[str, Any]
Damage = Callable[[Tensors, Header], object]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write(tmp_path / "a.tar", {key: {"jpg": key.encode() * 700, "cls": b"1"} for key in ("a", "bé")})
    return tmp_path / "a.tar"


def assert_refused(tar: Path) -> None:
    assert_raises(FormatError, r"a\.tar\.idx", open_shard, tar)


def rewrite(tar: Path, damage: Damage) -> None:
    index = index_of(tar)
    tensors = {name: np.array(tensor) for name, tensor in safetensors.numpy.load_file(index).items()}
    header = read_metadata(tar)
    damage(tensors, header)
    safetensors.numpy.save_file(tensors, index, {"shardio": json.dumps(header)})


def put(tensor: str, at: tuple[int, ...], value: int) -> Damage:
    return lambda tensors, _: tensors[tensor].__setitem__(at, value)


def cast(tensor: str, dtype: str) -> Damage:
    return lambda tensors, _: tensors.update({tensor: tensors[tensor].astype(dtype)})


def cut(tensor: str) -> Damage:
    return lambda tensors, _: tensors.update({tensor: np.ascontiguousarray(tensors[tensor][..., :-1])})


def say(name: str, value: object) -> Damage:
    return lambda _, header: header.update({name: value})


DAMAGES: dict[str, Damage] = {
    **{
        f"{name}-{dtype}": cast(name, dtype)
        for name, dtype in (("offset", "int32"), ("size", "uint64"), ("hash", "int64"), ("key_stop", "float64"))
    },
    **{f"no-{name}": lambda tensors, _, name=name: tensors.pop(name) for name in ("offset", "key_bytes")},  # type: ignore[misc]
    **{f"{name}-short": cut(name) for name in ("offset", "size", "hash", "key_stop", "key_bytes")},
    "offset-beyond-the-tar": put("offset", (0, 1), 10**9),
    "size-beyond-the-tar": put("size", (0, 1), 10**9),
    "offset-huge": put("offset", (0, 0), sys.maxsize),
    "size-huge": put("size", (1, 0), sys.maxsize),
    "offset-negative": put("offset", (0, 0), -1),
    "size-negative": put("size", (0, 0), -7),
    "keys-go-back": put("key_stop", (0,), 9),
    "key-negative": put("key_stop", (0,), -1),
    "key-beyond-the-keys": put("key_stop", (1,), 1000),
    "format-2-without-count": say("format", 2),
    "format-1-with-count": say("num_scattered", 0),
    "count-text": lambda _, header: header.update({"format": 2, "num_scattered": "0"}),
    "format-text": say("format", "one"),
    "fields-more": say("fields", ["cls", "jpg", "png"]),
    "fields-number": say("fields", 3),
    "fields-not-text": say("fields", [1, 2]),
    "samples-more": say("num_samples", 3),
    "samples-text": say("num_samples", "2"),
    "header-unknown": say("color", "red"),
    "header-incomplete": lambda _, header: header.pop("digest"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_an_index_with_wrong_values_is_refused(shard: Path, damage: Damage) -> None:
    rewrite(shard, damage)
    assert_refused(shard)


def test_another_format_is_named_and_an_index_that_was_written_again_unchanged_is_read(shard: Path) -> None:
    """Rewriting an index without changes causes no error, so the errors in the tests above come from the changes."""
    rewrite(shard, lambda *_: None)
    with open_shard(shard) as opened:
        assert [opened.index.key(i) for i in range(2)] == ["a", "bé"]
    rewrite(shard, lambda _, header: header.update({"format": 3, "color": "red"}))
    message = "has format 3, but this version of shardio reads 1 and 2: use the version"
    assert_raises(FormatError, message, open_shard, shard)


DEEP = b"[" * 100_000 + b"]" * 100_000
CONTENTS_OF_FILES = {
    "zeros": bytes(1000),
    "ones": b"\xff" * 1000,
    "text": b"this is not an index\n" * 9,
    "header-no-json": (4).to_bytes(8, "little") + b"{{{{",
    "header-a-list": (2).to_bytes(8, "little") + b"[]",
    "header-empty": (2).to_bytes(8, "little") + b"{}",
    "header-length-huge": b"\xff" * 8 + b"{}",
    "header-deep": len(DEEP).to_bytes(8, "little") + DEEP,
    "metadata-no-json": safetensors.numpy.save({"offset": np.zeros(1)}, {"shardio": "{"}),
    "metadata-of-another": safetensors.numpy.save({"weight": np.zeros(1)}, {"format": "pt"}),
    "no-metadata": safetensors.numpy.save({"weight": np.zeros(1)}),
}


@pytest.mark.parametrize(
    "content", [*CONTENTS_OF_FILES.values(), 0, 1, 7, 8, 9, 100, 500, -1000, -100, -8, -1, "missing", "a directory"]
)
def test_another_file_than_an_index_is_refused_and_closed(shard: Path, content: bytes | int | str) -> None:
    """If ``content`` is a number, the index is truncated to this size."""
    index, before = index_of(shard), find_open_files()
    if isinstance(content, str):
        index.unlink()
        if content == "a directory":
            index.mkdir()
    else:
        index.write_bytes(index.read_bytes()[:content] if isinstance(content, int) else content)
    assert_refused(shard)
    assert find_open_files() <= before


def test_keys_whose_lengths_overflow_are_refused(shard: Path) -> None:
    """In int64, the differences between 0, 3, -2**63, -1 and 6 may overflow to positive lengths."""
    write(shard, {key: {"txt": b"1"} for key in ("abc", "d", "e", "f")})
    rewrite(shard, lambda tensors, _: tensors["key_stop"].__setitem__(slice(None), [3, -(2**63), -1, 6]))
    assert_refused(shard)
    assert_raises(FormatError, "keys have negative lengths", read_columns, parse_location(index_of(shard)))


SHAPES: list[Header] = [{"shape": [], "data_offsets": [0, 1]}, {"shape": {}}, {"shape": [[]]}]
METADATA: list[Any] = [5, None, [], {"format": 1}, True]
OFFSETS: list[Any] = [[0, 10**9], [-32, 0], [32, 0], [0, 31], [0], ["0", "32"], [0.0, 32.0], None]
LAYOUTS: list[tuple[str, Header]] = [
    *(("key_bytes", shape) for shape in SHAPES),
    *(("__metadata__", {"shardio": value}) for value in METADATA),
    *(("offset", {"data_offsets": offsets}) for offsets in OFFSETS),
]


@pytest.mark.parametrize(("name", "change"), LAYOUTS, ids=str)
def test_a_header_that_does_not_fit_the_tensors_is_refused(shard: Path, name: str, change: Header) -> None:
    index = index_of(shard)
    index.write_bytes(change_layout(index.read_bytes(), lambda layout: layout[name].update(change)))
    assert_refused(shard)


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """Two shards, the first of which is larger, and their manifest."""
    shards = []
    for name, keys in (("a.tar", "AbcD"), ("b.tar", "ef")):
        samples = [Sample(key=key, fields={"cls": b"1", "txt": key.encode() * 30}, origin=key) for key in keys]
        shards.append(write_shard(parse_location(tmp_path / name), samples)[0])
    write_manifest(parse_location(tmp_path / "shardio.json"), Manifest(shards=tuple(shards), fields=("cls", "txt")))
    return tmp_path


def read_all(packed: Path) -> list[tuple[str, dict[str, bytes]]]:
    table = open_table(packed)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), table.manifest.fields)
    return [(sample.key, dict(sample.fields)) for sample in samples]


def test_an_index_of_more_samples_than_fit_the_tar_is_refused(two_shards: Path) -> None:
    number, path = 2**33, two_shards / "a.tar.idx"
    header = {**read_metadata(two_shards / "a.tar"), "num_samples": number}
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
    message = rf"index .*a\.tar\.idx has {number:,} samples .* more than .*a\.tar can"
    assert_raises(FormatError, message, open_shard, two_shards / "a.tar")


def test_no_flipped_bit_of_an_index_silently_changes_what_is_read(two_shards: Path) -> None:
    """The keys are short and in ASCII, because a plain tar header cannot hold other keys in full."""
    path, expected = index_of(two_shards / "a.tar"), read_all(two_shards)
    content, changed = path.read_bytes(), list[int]()
    for offset in range(len(content)):
        flipped = bytearray(content)
        flipped[offset] ^= 1 << (5 if chr(content[offset]).isalpha() else offset % 8)  # Flip the case of letters.
        path.write_bytes(flipped)
        try:
            found = read_all(two_shards)
        except (FormatError, SampleError):
            continue
        if found != expected:
            changed.append(offset)
    assert changed == []
    path.write_bytes(content)
    assert read_all(two_shards) == expected


def test_the_error_of_a_missing_index_names_the_command_that_rebuilds_it(out: Path) -> None:
    index_of(out / "shard-000000.tar").unlink()
    message = r"\.idx cannot be opened: .* rebuild it from its tar \(shardio repair\)"
    assert_raises(FormatError, message, SampleReader(open_table(out)).describe, 0, ())
    repair(parse_location(out))
    SampleReader(open_table(out)).describe(0, ())
