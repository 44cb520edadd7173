"""Samples by key equal those that tarfile reads, and no tar is scanned to find them."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio.errors import FormatError, SampleError
from shardio.shards import open_table
from shardio.storage.local import LocalFile
from tests.shards.conftest import tars as tars  # A fixture.
from tests.tars import index_of, read_members, write_tar


def test_samples_are_those_that_tarfile_reads(packed: Path) -> None:
    expected: dict[str, dict[str, object]] = {}
    for tar in sorted(packed.glob("*.tar")):
        for name, content in read_members(tar):
            key, _, field = name.partition(".")
            expected.setdefault(key, {"__key__": key})[field] = content
    with shardio.open(packed) as samples:
        assert list(samples) == list(samples.keys()) == list(expected)
        assert dict(samples) == expected
        assert len(samples) == len(expected)
        assert samples.fields == ("cls", "jpg")
        assert samples.manifest == open_table(packed).manifest


def test_unknown_keys_are_not_there(packed: Path) -> None:
    with shardio.open(packed) as samples:
        assert "class-0/name-000" in samples
        for key in ("", "class-0/name", "class-0/name-000.jpg", "\udc80", 3):
            assert key not in samples
        with pytest.raises(KeyError, match=r"no sample has the key 'dogs/1' in .*packed"):
            samples["dogs/1"]
        assert samples.get("dogs/1") is None


def test_lookups_read_no_tar(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a shard reads the headers of two samples; nothing else is read before a sample is wanted."""
    read = list[tuple[str, int]]()
    original = LocalFile.read

    def spy(self: LocalFile, start: int, stop: int) -> bytes:
        read.append((self.location.name, stop - start))
        return original(self, start, stop)

    monkeypatch.setattr(LocalFile, "read", spy)
    samples = shardio.open(packed)
    assert read == []
    assert "class-1/name-001" in samples
    # The content between the two headers is read along with them.
    assert {num_bytes for name, num_bytes in read if name.endswith(".tar")} == {1536}
    opened = {name for name, _ in read if name.endswith(".tar")}
    assert len(opened) == 1


def test_samples_may_lack_fields_and_keys_may_be_any_text(tmp_path: Path) -> None:
    members = [("ключ.txt", b"1"), ("b/c.seg.png", b"2"), ("b/c.txt", b""), ("\udc80.txt", b"4")]
    write_tar(tmp_path / "a.tar", members)
    with shardio.open(tmp_path / "a.tar") as samples:
        assert samples["ключ"] == {"__key__": "ключ", "txt": b"1"}
        assert samples["b/c"] == {"__key__": "b/c", "seg.png": b"2", "txt": b""}
        assert samples["\udc80"]["txt"] == b"4"
        assert samples.read("b/c", ["txt"]) == {"__key__": "b/c", "txt": b""}


def test_keys_with_equal_hashes_are_told_apart(tars: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.reading.keyed.hash_key", lambda key: 7)
    monkeypatch.setattr("shardio.shards.index.KeyColumn.hash_all", lambda keys: np.full(len(keys), 7, np.uint64))
    with shardio.open(tars) as samples:
        assert {key: sample["txt"] for key, sample in samples.items()} == {
            f"{i}-{j}": b"%d" % j for i in range(4) for j in range(i + 1)
        }
        assert "4-0" not in samples


def test_a_key_that_occurs_twice_is_an_error_with_both_places(tars: Path) -> None:
    write_tar(tars / "x-000004.tar", [("new.txt", b"0"), ("2-1.txt", b"9")])
    samples = shardio.open(tars)
    assert len(samples) == 12
    with pytest.raises(
        FormatError, match=r"key '2-1', in .*x-000002.tar at byte 1536 and in .*x-000004.tar at byte 15"
    ):
        samples["0-0"]


def test_a_damaged_sample_is_an_error(tmp_path: Path) -> None:
    tar = tmp_path / "shard-000000.tar"
    write_tar(tar, [("a.txt", b"abc"), ("b.txt", b"abc")])
    samples = shardio.open(tar)
    with tar.open("r+b") as file:
        file.seek(1536)
        file.write(b"x")
    assert samples["a"]["txt"] == b"abc"
    with pytest.raises(SampleError, match="sample b"):
        samples["b"]
    assert shardio.open(tar, verify="off")["b"]["txt"] == b"xbc"


def test_an_index_of_another_manifest_is_refused(tmp_path: Path, packed: Path) -> None:
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    other = index_of(tmp_path / "shard-000004.tar")
    other.write_bytes(index_of(packed / "shard-000000.tar").read_bytes())
    with pytest.raises(FormatError, match=r"shard-000004.tar.idx has 5 samples, but the manifest says 1"):
        shardio.open(tmp_path)["x"]


def test_it_can_be_pickled(packed: Path) -> None:
    samples = shardio.open(packed)
    copy = pickle.loads(pickle.dumps(samples))
    assert dict(copy) == dict(samples)
    samples.close()
    assert "class-0/name-000" in samples
