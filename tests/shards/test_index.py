from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import safetensors
import xxhash
from hypothesis import HealthCheck, given, settings, strategies as st

from shardio.errors import StaleIndexError
from shardio.sample import Sample
from shardio.shards import ShardIndex, write_shard
from shardio.storage import parse_location
from tests.files import count_open_files
from tests.tars import index_of, open_file, open_shard, read_members

KEYS = st.text(st.characters(exclude_categories=["C"], exclude_characters="/."), min_size=1, max_size=120)
CONTENTS = st.dictionaries(st.sampled_from(["jpg", "cls", "json", "seg.png"]), st.binary(max_size=600), min_size=1)
SAMPLES = st.dictionaries(KEYS, CONTENTS, min_size=1, max_size=6)


def write(path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    write_shard(parse_location(path), [Sample(key=key, fields=fields, origin=key) for key, fields in samples.items()])


@given(SAMPLES)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_was_written_is_read(tmp_path: Path, samples: dict[str, dict[str, bytes]]) -> None:
    write(tmp_path / "a.tar", samples)
    with open_shard(tmp_path / "a.tar") as shard:
        read = [shard.read(i, shard.index.header.fields) for i in range(shard.index.header.num_samples)]
    assert [(sample.key, dict(sample.fields)) for sample in read] == list(samples.items())


def test_offsets_sizes_and_hashes_are_those_of_the_tar(packed: Path) -> None:
    for path in sorted(packed.glob("*.tar")):
        with tarfile.open(path) as tar:
            expected = {info.name: (info.offset_data, info.size) for info in tar}
        contents = dict(read_members(path))
        with open_file(path) as file, open_shard(path) as shard:
            index, header = shard.index, shard.index.header
            found = {}
            for sample in range(header.num_samples):
                (starts,), (stops,), (hashes,) = (
                    places.tolist() for places in index.locate(np.array([sample]), header.fields)
                )
                for field, start, stop, content_hash in zip(header.fields, starts, stops, hashes, strict=True):
                    name = f"{index.key(sample)}.{field}"
                    found[name] = (start, stop - start)
                    assert file.read(start, stop) == contents[name]
                    assert content_hash == xxhash.xxh3_64_intdigest(contents[name])
            assert found == expected
            assert (header.num_bytes, header.digest) == (
                path.stat().st_size,
                xxhash.xxh3_128_hexdigest(path.read_bytes()),
            )


def test_an_index_is_a_plain_safetensors_file(packed: Path) -> None:
    path = packed / "shard-000000.tar"
    members = read_members(path)
    with safetensors.safe_open(index_of(path), framework="numpy") as file:
        header = json.loads(file.metadata()["shardio"])
        offset, size, key_stop = (file.get_tensor(name) for name in ("offset", "size", "key_stop"))
        keys = file.get_tensor("key_bytes").tobytes()
        assert set(file.keys()) == {"offset", "size", "hash", "key_stop", "key_bytes"}
        assert list(file.metadata()) == ["shardio"]
    assert header["fields"] == ["cls", "jpg"]
    assert header["num_samples"] == len(members) // 2 == len(key_stop)
    names = [f"{keys[start:stop].decode()}.{field}" for start, stop in zip([0, *key_stop], key_stop, strict=False)
             for field in header["fields"]]  # fmt: skip
    assert names == [name for name, _ in members]
    whole = path.read_bytes()
    ranges = zip(offset.T.ravel(), size.T.ravel(), strict=True)
    assert [whole[start : start + length] for start, length in ranges] == [content for _, content in members]


def test_a_missing_field_has_no_range(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"a": {"jpg": b"1"}, "b": {"json": b"{}"}, "c": {"jpg": b"", "json": b""}})
    with open_shard(tmp_path / "a.tar") as shard:
        starts, stops, _ = shard.index.locate(np.arange(3), ("jpg", "json", "png"))
        expected = [[True, False, False], [False, True, False], [True, True, False]]
        assert (starts >= 0).tolist() == (stops >= 0).tolist() == expected
        assert dict(shard.read(1, ["jpg", "json"]).fields) == {"json": b"{}"}
        assert dict(shard.read(2, ["json", "jpg"]).fields) == {"jpg": b"", "json": b""}


def test_fields_come_in_the_requested_order(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"a": {"x": b"1", "y": b"2", "z": b"3"}})
    with open_shard(tmp_path / "a.tar") as shard:
        assert list(shard.read(0, ["z", "x"]).fields.items()) == [("z", b"3"), ("x", b"1")]


def test_equal_samples_give_equal_tars_and_indexes(tmp_path: Path) -> None:
    samples = {f"k{i}": {"jpg": bytes([i]), "cls": b"0"} for i in range(10)}
    for name in "a", "b":
        (tmp_path / name).mkdir()
        write(tmp_path / name / "x.tar", samples)
    for file in "x.tar", "x.tar.idx":
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_shard_does_not_appear_before_its_samples_are_written(tmp_path: Path) -> None:
    def samples() -> Iterator[Sample]:
        for key in "ab":
            assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
            yield Sample(key=key, fields={"jpg": b"1"}, origin=key)

    write_shard(parse_location(tmp_path / "a.tar"), samples())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "a.tar.idx"]


def test_a_shard_whose_samples_fail_does_not_appear(tmp_path: Path) -> None:
    def samples() -> Iterator[Sample]:
        yield Sample(key="a", fields={"jpg": b"1"}, origin="a")
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_shard(parse_location(tmp_path / "a.tar"), samples())
    assert list(tmp_path.iterdir()) == []


def test_an_open_shard_holds_two_descriptors_and_a_closed_one_none(packed: Path) -> None:
    path, before = packed / "shard-000000.tar", count_open_files()
    with open_shard(path):
        assert count_open_files() == before + 2
    assert count_open_files() == before


def assert_stale(path: Path) -> None:
    with pytest.raises(StaleIndexError, match=r"a\.tar\.idx.*a\.tar has changed.*\. Download .* delete .*a\.tar\.idx"):
        open_shard(path)


def test_the_index_of_a_tar_that_was_appended_to_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, {"a": {"jpg": b"1"}})
    with tarfile.open(path, "a") as tar:
        tar.addfile(tarfile.TarInfo("b.jpg"))
    assert_stale(path)


@pytest.mark.parametrize("other", [["z", "b", "c"], ["a", "b", "z"]], ids=["first", "last"])
def test_the_index_of_another_tar_of_the_same_size_is_stale(tmp_path: Path, other: list[str]) -> None:
    write(tmp_path / "a.tar", {key: {"jpg": b"1"} for key in "abc"})
    write(tmp_path / "b.tar", {key: {"jpg": b"1"} for key in other})
    assert (tmp_path / "a.tar").stat().st_size == (tmp_path / "b.tar").stat().st_size
    (tmp_path / "b.tar").replace(tmp_path / "a.tar")
    assert_stale(tmp_path / "a.tar")


def test_the_index_of_a_truncated_tar_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, {"a": {"jpg": b"1" * 3000}})
    with path.open("r+b") as file:
        file.truncate(1024)
    assert_stale(path)


def test_an_index_may_lie_apart_from_its_tar(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"a": {"jpg": b"1"}})
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "a.tar.idx").rename(tmp_path / "elsewhere" / "x")
    with open_file(tmp_path / "a.tar") as tar, closing(ShardIndex(parse_location(moved), tar)) as index:
        assert index.key(0) == "a"
