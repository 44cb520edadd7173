"""Datasets of PPM files: loaders read only the rows that crops need, and deliver the same pixels as from PNGs."""

from __future__ import annotations

import os
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardio
from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.errors import SampleError
from shardio.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    MultiCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from tests.files import flip
from tests.images.pictures import make_picture, save
from tests.raising import assert_raises
from tests.servers.web_folder import serve_folder
from tests.tars import write_tar

CROP = Compose([RandomResizedCrop(24), RandomHorizontalFlip()])

TRANSFORMS: dict[str, Any] = {
    "random crop": CROP,
    "evaluation": Compose([Resize(48), CenterCrop(40)]),
    "copy": CenterCrop(50),
    "edited": Compose([RandomResizedCrop(24, antialias=True), ColorJitter(0.4, 0.4, 0.4, 0.1)]),
    "several": MultiCrop([CROP, CROP, RandomResizedCrop(16)]),
    "a function": Compose([lambda image: image[::-1, 5:].copy(), RandomResizedCrop(24)]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return class folders, and packed directories, of the same pictures as PPM (some of them gray) and as PNG."""
    root = tmp_path_factory.mktemp("pixels")
    for number in range(24):
        pixels = make_picture(60 + number, 90 - number, seed=number)
        if number % 5 == 0:
            pixels = np.repeat(pixels[..., :1], 3, axis=2)
        for suffix in ("ppm", "png"):
            stored = pixels[..., 0] if suffix == "ppm" and number % 5 == 0 else pixels
            path = root / suffix / f"class-{number % 3}" / f"{number:02d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(save(stored, suffix.upper()))
    for suffix in ("ppm", "png"):
        shardio.pack(root / suffix, root / f"packed-{suffix}", max_shard_samples=9)
    return {path.name: path for path in root.iterdir()}


def read_epochs(dataset: Any, num_workers: int = 0, num_epochs: int = 2) -> list[Any]:
    """Return all batches. The second epoch reads samples that have been compared with the index file."""
    sampler = None if isinstance(dataset, ShardDataset) else EpochSampler(dataset)
    loader = DataLoader(dataset, 5, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)
    return [[list(batch) for batch in loader] for _ in range(num_epochs)]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, expected)
    else:
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", [ShardDataset, ShardMapDataset, ImageFolder])
def test_batches_equal_those_of_pngs(kind: Any, name: str, folders: dict[str, Path]) -> None:
    prefix = "" if kind is ImageFolder else "packed-"
    options = {"transform": TRANSFORMS[name]} | ({"shuffle": True} if kind is ShardDataset else {})
    ppm, png = (kind(folders[prefix + suffix], **options) for suffix in ("ppm", "png"))
    assert_same(read_epochs(ppm), read_epochs(png))


@pytest.mark.parametrize("options", [{"decode": "pil"}, {"orientation": "apply"}, {"verify": "off"}])
def test_batches_equal_those_of_pngs_with_other_settings(options: Any, folders: dict[str, Path]) -> None:
    options |= {} if "decode" in options else {"transform": CROP}
    ppm, png = (ShardDataset(folders[f"packed-{suffix}"], shuffle=True, **options) for suffix in ("ppm", "png"))
    for one, other in zip([*ppm, *ppm], [*png, *png], strict=True):
        np.testing.assert_array_equal(np.asarray(one[0]), np.asarray(other[0]))


@pytest.mark.slow
def test_batches_from_a_web_server_and_worker_processes_equal_local_ones(folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"transform": CROP, "shuffle": True}
    dataset = ShardDataset(folders["packed-ppm"], **options)
    expected = read_epochs(dataset, num_epochs=3)
    assert_same(read_epochs(dataset, num_workers=2, num_epochs=3), expected)
    with serve_folder(folders["packed-ppm"]) as (url, _):
        assert_same(read_epochs(ShardDataset(url, **options)), expected[:2])


def test_a_field_that_is_read_by_its_own_name_is_whole(folders: dict[str, Path]) -> None:
    path = folders["packed-ppm"]
    dataset = ShardMapDataset(path, fields=("image", "ppm", "key"), transform=CROP)
    with shardio.open(path) as samples:
        for _ in range(2):
            for image, pixels, key in map(dataset.__getitem__, range(24)):
                assert image.shape == (3, 24, 24)
                stored = np.asarray(pixels if pixels.ndim == 2 else pixels.permute(1, 2, 0))
                assert save(stored, "PPM") == samples[key]["ppm"]
    own = ShardMapDataset(path, fields=("image", "ppm"), decoders={"ppm": len})
    with shardio.open(path) as samples:
        lengths = [len(samples[key]["ppm"]) for key in samples]
    assert [[own[number][1] for number in range(24)] for _ in range(2)] == [lengths] * 2


def count_read_bytes() -> int:
    """Return how many bytes this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def write_pictures(folder: Path, count: int, height: int, width: int, suffix: str = "ppm") -> None:
    folder.mkdir()
    for number in range(count):
        content = save(make_picture(height, width, seed=number), "PPM" if suffix == "ppm" else "JPEG")
        (folder / f"{number}.{suffix}").write_bytes(content)


def test_only_the_rows_of_a_crop_are_read(tmp_path: Path) -> None:
    height, width, num_samples = 400, 500, 20
    write_pictures(tmp_path / "images", num_samples, height, width)
    shardio.pack(tmp_path / "images", tmp_path / "packed")
    dataset = ShardMapDataset(tmp_path / "packed", fields="image", transform=CenterCrop((40, 30)))
    before = count_read_bytes()
    first = [dataset[number] for number in range(num_samples)]
    at_first = count_read_bytes() - before
    assert at_first > num_samples * 3 * height * width  # Whole members are compared with the index file.
    assert_same([dataset[number] for number in range(num_samples)], first)
    assert count_read_bytes() - before - at_first < num_samples * (3 * 40 * width + 4000)


def test_damage_is_found_at_the_first_read(folders: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(folders["packed-ppm"], tmp_path / "copy")
    tar = path / "shard-000001.tar"
    flip(tar, tar.read_bytes().index(b"P6\n") + 4000)
    assert_raises(SampleError, "is damaged", list, ShardDataset(path, transform=CROP))


def test_a_tar_truncated_in_use_is_an_error_that_names_the_sample(folders: dict[str, Path], tmp_path: Path) -> None:
    path = shutil.copytree(folders["packed-ppm"], tmp_path / "copy")
    dataset = ShardMapDataset(path, fields=("image", "key"), transform=CROP)
    samples = [dataset[number] for number in range(24)]
    tar = path / "shard-000000.tar"
    os.truncate(tar, tar.stat().st_size // 2)
    key = samples[8][1]
    assert_raises(SampleError, f"sample {key} .*shard-000000.*truncated", dataset.__getitem__, 8)
    assert dataset[23][0].shape == (3, 24, 24)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("suffix", ["ppm", "jpg"])
def test_a_tar_that_was_written_again_is_compared_again(suffix: str, num_workers: int, tmp_path: Path) -> None:
    write_pictures(tmp_path / "images", 6, 40, 50, suffix)
    members = [(f"{number}.{suffix}", (tmp_path / "images" / f"{number}.{suffix}").read_bytes()) for number in range(6)]
    tar = tmp_path / "a.tar"
    write_tar(tar, members)
    dataset = ShardDataset(tar, fields="image", transform=CROP, decoded_cache="20MB")
    loader = DataLoader(dataset, 6, num_workers=num_workers, persistent_workers=num_workers > 0)
    for _ in range(2):
        list(loader)
    name, content = members[2]
    members[2] = name, content[:-300] + bytes(byte ^ 1 for byte in content[-300:])
    before = tar.stat()
    write_tar(tar, members)
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    assert_raises(SampleError, rf"field '{suffix}' of sample 2 in .* is damaged", list, loader)


@pytest.mark.parametrize("suffix", ["ppm", "jpg"])
def test_a_resumed_run_has_the_same_batches(suffix: str, tmp_path: Path) -> None:
    write_pictures(tmp_path / "images", 20, 40, 50, suffix)
    shardio.pack(tmp_path / "images", tmp_path / "packed", max_shard_samples=7)
    options: dict[str, Any] = {"fields": "image", "transform": CROP, "shuffle": True}
    whole, stopped, resumed = (
        DataLoader(ShardDataset(tmp_path / "packed", decoded_cache=cache, **options), 3)
        for cache in (None, "21MB", "21MB")
    )
    found = list(islice(stopped, 3))
    resumed.load_state_dict(stopped.state_dict())
    assert_same([*found, *resumed], list(whole))


def test_stats_count_the_images_that_need_no_decoder(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for decoder in ("kernel", "raw"):
        loader = DataLoader(ShardDataset(folders["packed-ppm"], transform=CROP), 5)
        list(loader)
        counts = loader.stats().num_images_by_decoder
        assert {name: count for name, count in counts.items() if count} == {decoder: 24}
        monkeypatch.setattr("shardio.images.rendering.find_kernel", lambda: None)
