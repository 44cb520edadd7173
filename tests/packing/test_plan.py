"""The plan: no sample is lost, limits hold, and the output depends on nothing but input and settings."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import shardio
from shardio.errors import PackError
from shardio.packing import PackOptions, PackResult
from shardio.shards import Manifest, open_table
from tests.files import read_files
from tests.packing.packs import Change, pack
from tests.sources import write_images
from tests.tars import read_members, read_with_webdataset

JPEG_START = b"\xff\xd8\xff" + bytes(49)
"""Passes for an image; any number of bytes may follow."""


def read_keys(out: Path) -> list[list[str]]:
    return [[key for key, _ in read_with_webdataset(path)] for path in sorted(out.glob("shard-*.tar"))]


def all_keys(out: Path) -> list[str]:
    return [key for keys in read_keys(out) for key in keys]


@given(
    sizes=st.lists(st.integers(52, 6000), min_size=1, max_size=25),
    max_shard_size=st.integers(1, 20_000),
    max_shard_samples=st.none() | st.integers(1, 6),
    seed=st.none() | st.integers(0, 2**63 - 1),
    prefix=st.sampled_from(["", "class/"]),
    name_length=st.sampled_from([1, 90, 94, 95, 110]),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_shards_hold_every_sample_once_and_keep_their_limits(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    max_shard_size: int,
    max_shard_samples: int | None,
    seed: int | None,
    prefix: str,
    name_length: int,
) -> None:
    root = tmp_path_factory.mktemp("limits")
    (root / "in" / prefix).mkdir(parents=True)
    keys = [f"{prefix}{i:0{name_length}d}" for i in range(len(sizes))]
    for i, size in enumerate(sizes):
        (root / "in" / f"{keys[i]}.jpg").write_bytes(JPEG_START + bytes([i]) * (size - len(JPEG_START)))
    limits = {"max_shard_size": max_shard_size, "max_shard_samples": max_shard_samples}
    manifest = shardio.pack(root / "in", root / "out", shuffle_seed=seed, check=False, **limits)  # type: ignore[arg-type]
    shards = read_keys(root / "out")
    found = list(chain.from_iterable(shards))
    assert sorted(found) == sorted(keys)
    assert found == sorted(keys) or seed is not None
    assert [len(keys) for keys in shards] == manifest.shard_sizes.tolist()
    for keys, path in zip(shards, sorted((root / "out").glob("*.tar")), strict=True):
        assert path.stat().st_size <= max_shard_size or len(keys) == 1
        assert max_shard_samples is None or len(keys) <= max_shard_samples
    shutil.rmtree(root)


def test_a_shard_is_full_before_the_next_one_starts(tmp_path: Path) -> None:
    write_images(tmp_path / "in", classes=4, per_class=10)
    shardio.pack(tmp_path / "in", tmp_path / "out", max_shard_size=9000)
    paths = sorted((tmp_path / "out").glob("*.tar"))
    assert len(paths) > 3
    for path, following in pairwise(paths):
        needed = sum(512 + -(-len(content) // 512) * 512 for _, content in read_members(following)[:2])
        assert path.stat().st_size + needed > 9000


def test_a_shard_may_have_exactly_the_maximum_size(tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{i}.jpg").write_bytes(JPEG_START + bytes(512 - len(JPEG_START)))
    two_samples = 2 * (512 + 512) + 1024
    for limit, sizes in (two_samples, [2, 2]), (two_samples - 1, [1, 1, 1, 1]), (two_samples + 1023, [2, 2]):
        manifest = shardio.pack(tmp_path / "in", tmp_path / str(limit), max_shard_size=limit, check=False)
        assert manifest.shard_sizes.tolist() == sizes


def test_the_path_and_the_age_of_the_source_change_no_byte(images: Path, tmp_path: Path) -> None:
    shardio.pack(images, tmp_path / "first", max_shard_samples=4)
    moved = tmp_path / "another" / "folder"
    for path in sorted(images.rglob("*.jpg"), reverse=True):  # A different order on disk.
        copy = moved / path.relative_to(images)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1_000_000_000, 1_000_000_000))
    shardio.pack(moved, tmp_path / "second", max_shard_samples=4)
    assert read_files(tmp_path / "first") == read_files(tmp_path / "second")


def test_another_seed_packs_the_same_samples_in_another_order(images: Path, tmp_path: Path) -> None:
    keys = []
    for seed in 0, 1, 2**63 - 1:
        shardio.pack(images, tmp_path / str(seed), shuffle_seed=seed)
        keys.append(all_keys(tmp_path / str(seed)))
    assert sorted(keys[0]) == sorted(keys[1]) == sorted(keys[2])
    assert keys[0] != keys[1] != keys[2] != keys[0]


def test_classes_are_mixed(tmp_path: Path) -> None:
    """With 4 classes of 25 samples, a shuffle changes class about 75 times, sorted keys 3 times."""
    write_images(tmp_path / "in", classes=4, per_class=25, width=8, height=8)
    shardio.pack(tmp_path / "in", tmp_path / "out", max_shard_samples=25)
    shards = [[key.split("/")[0] for key in keys] for keys in read_keys(tmp_path / "out")]
    classes = list(chain.from_iterable(shards))
    assert sum(a != b for a, b in pairwise(classes)) > 50
    assert [len(set(keys)) for keys in shards] == [4, 4, 4, 4]


def test_pack_returns_the_manifest_that_it_writes_with_the_settings(images: Path, tmp_path: Path) -> None:
    options = {"max_shard_size": 20_000, "max_shard_samples": 6, "shuffle_seed": 5}
    manifest = shardio.pack(images, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert isinstance(manifest, Manifest)
    assert manifest == open_table(tmp_path / "out").manifest
    sizes = [(tmp_path / "out" / shard.name).stat().st_size for shard in manifest.shards]
    assert [shard.num_bytes for shard in manifest.shards] == sizes
    assert {name: manifest.pack[name] for name in options} == options
    assert (manifest.classes, manifest.fields) == (("class-0", "class-1", "class-2"), ("cls", "jpg"))


def test_settings_may_be_numpy_integers(images: Path, tmp_path: Path) -> None:
    values = {"max_shard_size": 9000, "max_shard_samples": 4, "shuffle_seed": 3, "max_side": 8, "quality": 70}
    values |= {"max_pixels": 10**6, "num_workers": 1}
    shardio.pack(images, tmp_path / "one", jpeg="reencode", **values)  # type: ignore[arg-type]
    integers = {name: np.int64(value) for name, value in values.items()}
    shardio.pack(images, tmp_path / "two", jpeg="reencode", **integers)  # type: ignore[arg-type]
    assert read_files(tmp_path / "one") == read_files(tmp_path / "two")


@pytest.mark.parametrize("option", ["max_shard_size", "max_shard_samples", "shuffle_seed", "max_pixels", "num_workers"])
def test_floats_are_refused_before_anything_is_written(images: Path, tmp_path: Path, option: str) -> None:
    with pytest.raises(TypeError, match=f"{option} must be an integer, got 1000000.5"):
        shardio.pack(images, tmp_path / "out", jpeg="reencode", **{option: 1e6 + 0.5})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="check must be True or False, got None"):
        shardio.pack(images, tmp_path / "out", check=None)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_each_option_is_in_the_signature_and_the_docstring() -> None:
    parameters = dict(list(inspect.signature(shardio.pack).parameters.items())[2:])
    options = {each.name: each.default for each in fields(PackOptions)}
    assert {name: each.default for name, each in parameters.items()} == options
    documented = re.findall(
        r"^    (\w+): ", (inspect.getdoc(shardio.pack) or "").partition("Returns:")[0], re.MULTILINE
    )
    assert documented == ["src", "dst", *options]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of real processes on this machine, to which this process is connected."""
    ray: Any = pytest.importorskip("ray")
    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.mark.slow
def test_a_ray_cluster_writes_the_same_bytes(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "in"
    write_images(source, classes=2, per_class=5, width=8, height=8)
    (source / "class-0" / "broken.jpg").write_bytes(b"no image")

    def pack_to(out: Path, change: Change | None = None, **options: Any) -> PackResult:
        return pack(source, out, change, max_shard_samples=3, **options)

    pack_to(tmp_path / "alone", num_workers=1)
    alone = read_files(tmp_path / "alone")
    monkeypatch.chdir(tmp_path)  # Tasks run in other directories.
    assert [sample.key for sample in pack_to(Path("out"), engine="ray").rejected] == ["class-0/broken"]
    assert read_files(tmp_path / "out") == alone
    path, elsewhere = source / "class-1" / "name-003.jpg", tmp_path / "elsewhere.jpg"
    with pytest.raises(PackError, match=r"class-1/name-003\.jpg is missing"):
        pack_to(tmp_path / "2", Change(lambda: path.rename(elsewhere)), engine="ray", num_workers=1)
    elsewhere.rename(path)
    pack_to(tmp_path / "2")
    assert read_files(tmp_path / "2") == alone
    command = [sys.executable, "-m", "shardio", "pack", str(source), "3", "--max-shard-samples", "3"]
    options = ["--max-shard-size", "1GiB", "--engine", "ray", "--address", cluster]
    subprocess.run([*command, *options], check=True, capture_output=True)
    assert read_files(tmp_path / "3") == alone
