"""Merged, split and resharded datasets hold the same samples, byte for byte."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import shardio
from shardio.errors import FormatError, PackError, SampleError
from shardio.packing.sources import tars
from shardio.shards import open_table
from tests.files import read_files
from tests.tars import Samples, read_with_webdataset, write_tar


def samples_of(folder: Path) -> Samples:
    return read_with_webdataset(*sorted(folder.glob("*.tar")))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Two tars of another tool: with long, international and capital names, and a sample that lacks a field."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    long = "d/" * 80 + "ü"
    write_tar(folder / "a.tar", [("1.JPG", b"1" * 700), ("1.cls", b"0"), ("README", b""), (f"{long}.jpg", b"2")])
    write_tar(folder / "b.tar", [("3.seg.png", b""), ("3.jpg", b"3")])
    return folder


@pytest.mark.parametrize(
    "limits", [{"max_shard_samples": 4}, {"max_shard_size": 20000}, {"max_shard_size": "1MiB"}, {"max_shard_size": 1}]
)
def test_resharding_keeps_the_samples_and_their_order(packed: Path, tmp_path: Path, limits: dict[str, Any]) -> None:
    before = open_table(packed).manifest
    manifest = shardio.reshard(packed, tmp_path / "out", **limits)
    assert samples_of(tmp_path / "out") == samples_of(packed)
    assert (manifest.fields, manifest.classes) == (before.fields, before.classes)
    assert (manifest.pack["jpeg"], manifest.pack["num_tiled"]) == ("copy", 0)
    assert max(entry.num_samples for entry in manifest.shards) <= limits.get("max_shard_samples", 21)
    assert shardio.verify(tmp_path / "out", deep=True) == []


def test_resharding_with_the_settings_of_the_pack_gives_its_shards(packed: Path, tmp_path: Path) -> None:
    manifest = shardio.reshard(packed, tmp_path / "out", max_shard_samples=5)
    before, after = read_files(packed), read_files(tmp_path / "out")
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} <= {"shardio.json"}
    assert manifest.shards == open_table(packed).manifest.shards


def test_shuffling_is_reproducible_whatever_is_read_together(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, num_together in enumerate((256, 3)):
        monkeypatch.setattr(tars, "MAX_SAMPLES", num_together)
        monkeypatch.setattr(tars, "MAX_BYTES", 4000 if i else 2**25)
        monkeypatch.setattr(tars, "MAX_OPEN", 2)
        shardio.reshard(packed, tmp_path / str(i), max_shard_samples=8, shuffle_seed=3)
    assert read_files(tmp_path / "0") == read_files(tmp_path / "1")
    assert samples_of(tmp_path / "0") != samples_of(packed)
    assert sorted(samples_of(tmp_path / "0")) == sorted(samples_of(packed))


def test_foreign_tars_become_a_packed_dataset(foreign: Path, tmp_path: Path) -> None:
    manifest = shardio.reshard(foreign, tmp_path / "out")
    assert samples_of(tmp_path / "out") == samples_of(foreign)
    assert manifest.fields == ("cls", "jpg", "seg.png")
    assert shardio.verify(tmp_path / "out") == []


def test_merging_puts_one_dataset_after_another(packed: Path, foreign: Path, tmp_path: Path) -> None:
    (foreign / "a.tar").unlink()  # It has labels without names.
    manifest = shardio.merge(tmp_path / "out", [packed, foreign / "b.tar"], max_shard_samples=100)
    assert samples_of(tmp_path / "out") == samples_of(packed) + read_with_webdataset(foreign / "b.tar")
    assert len(manifest.shards) == 1
    assert manifest.classes == open_table(packed).manifest.classes
    assert "num_tiled" not in manifest.pack


def test_datasets_that_do_not_fit_are_not_merged(packed: Path, foreign: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match="two samples have the key 'class-"):
        shardio.merge(tmp_path / "out", [packed, shutil.copytree(packed, tmp_path / "copy")])
    with pytest.raises(PackError, match="labels without class names"):
        shardio.merge(tmp_path / "out", [packed, foreign])
    with pytest.raises(ValueError, match="a list"):
        shardio.merge(tmp_path / "out", packed)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(PackError, match="holds tars that would be read"):
        shardio.merge(packed, [packed], overwrite=True)
    assert not (tmp_path / "out").exists()
    assert shardio.verify(packed) == []


def test_damage_is_found_while_copying(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tars, "MAX_SAMPLES", 3)
    damaged = Path(shutil.copytree(packed, tmp_path / "damaged"))
    tar = damaged / "shard-000003.tar"
    content = bytearray(tar.read_bytes())
    content[content.index(b"\xff\xd9\0")] ^= 1
    tar.write_bytes(content)
    with pytest.raises(SampleError, match=r"shard-000003\.tar.*xxh3-64"):
        shardio.reshard(damaged, tmp_path / "out", max_shard_samples=5)
    assert not (tmp_path / "out" / "shardio.json").exists()
    with pytest.raises(FormatError, match="unfinished"):
        open_table(tmp_path / "out")
    shardio.reshard(packed, tmp_path / "out", max_shard_samples=5, overwrite=True)
    assert shardio.verify(tmp_path / "out") == []


def test_a_split_depends_on_keys_alone(packed: Path, tmp_path: Path) -> None:
    manifests = shardio.split(packed, tmp_path / "out", by=[0.6, 0.4], names=["train", "val"])
    parts = {name: samples_of(tmp_path / "out" / name) for name in manifests}
    for key, _ in parts["train"]:
        assert xxhash.xxh3_64(key.encode()).intdigest() < 0.6 * 2**64
    whole = samples_of(packed)
    assert parts["train"] == [sample for sample in whole if sample in parts["train"]]  # In their order.
    assert sorted(parts["train"] + parts["val"]) == sorted(whole)
    assert {manifest.classes for manifest in manifests.values()} == {open_table(packed).manifest.classes}
    assert shardio.verify(tmp_path / "out" / "val") == []
    with shardio.ShardWriter(tmp_path / "more") as writer:
        for i in range(20):
            writer.write({"__key__": f"new/{i}", "txt": ""})
    shardio.merge(tmp_path / "both", [tmp_path / "more", packed])
    shardio.split(tmp_path / "both", tmp_path / "again", by=["0.6", "0.4"], names=["train", "val"])
    for name, samples in parts.items():
        after = samples_of(tmp_path / "again" / name)
        assert [sample for sample in after if not sample[0].startswith("new/")] == samples
        assert len(after) > len(samples)


def test_fractions_are_kept_on_average(tmp_path: Path) -> None:
    with shardio.ShardWriter(tmp_path / "in") as writer:
        for i in range(2000):
            writer.write({"__key__": f"{i}", "txt": ""})
    manifests = shardio.split(tmp_path / "in", tmp_path / "out", by=[0.5, 0.3, 0.2], names=["a", "b", "c"])
    sizes = np.array([manifest.num_samples for manifest in manifests.values()])
    assert sizes.sum() == 2000
    assert np.abs(sizes / 2000 - [0.5, 0.3, 0.2]).max() < 0.05


@pytest.mark.parametrize(
    ("by", "names", "message"),
    [
        ([0.9, 0.2], ["a", "b"], "sum to 1"),
        ([1.0, 0.0], ["a", "b"], "positive"),
        ([1.0], ["a"], "at least 2"),
        ([0.5, 0.5], ["a"], "same length"),
        ([0.5, 0.5], ["a", "a"], "must differ"),
        ([0.5, 0.5], ["a", "../b"], "directory's name"),
        (["half", 0.5], ["a", "b"], "must be numbers such as"),
    ],
)
def test_wrong_parts_are_refused(packed: Path, tmp_path: Path, by: list[Any], names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shardio.split(packed, tmp_path / "out", by=by, names=names)
    assert not (tmp_path / "out").exists()


def test_an_empty_part_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(PackError, match=r"none of the 21 samples .* in b"):
        shardio.split(packed, tmp_path / "out", by=["0.999999", "0.000001"], names=["a", "b"])
    assert not (tmp_path / "out").exists()
