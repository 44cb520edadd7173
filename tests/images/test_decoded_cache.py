"""The decoded cache: crops of kept images equal those of the files, in any process, however full the cache is."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import shardio
from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.images import (
    CropPlan,
    DecodedCache,
    Orientation,
    RenderedImages,
    Resampling,
    TooManyPixels,
    open_image,
    render_chunk,
    sizes_of,
)
from shardio.images.decoded_cache import MIN_BYTES, find_key
from shardio.images.tiling import tile_jpeg
from shardio.transforms import CenterCrop, ColorJitter, Compose, MultiCrop, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.test_killed_workers import kill_worker_processes
from tests.faults.worker_processes import warns_of_deaths
from tests.images.crop_laws import draw_plan
from tests.images.jpeg_files import SAMPLINGS, by_pillow, make_jpeg
from tests.images.pictures import TURNS, exif_of, make_picture, save
from tests.raising import assert_raises
from tests.sources import write_images, write_mixed

CROP = Compose([RandomResizedCrop(24), RandomHorizontalFlip()])


def make_cache(num_bytes: int = 1 << 24) -> DecodedCache:
    return DecodedCache(num_bytes, uuid.uuid4().hex)


def render(*contents: bytes, orientation: Orientation = "ignore", cache: DecodedCache | None = None) -> RenderedImages:
    """Render whole images."""
    pictures = [open_image(content, orientation=orientation, cache=cache) for content in contents]
    return render_chunk(pictures, CropPlan.whole(sizes_of(pictures)))


def make_files() -> dict[str, bytes]:
    """Return untouched and tiled JPEGs with every chroma sampling, and progressive JPEGs."""
    files = {}
    for name, factors in SAMPLINGS.items():
        for size in ((1, 1), (3, 41), (61, 94), (128, 96)):
            files[f"{name} {size}"] = content = make_jpeg("", make_picture(*size), factors=factors, quality=85).content
            files[f"{name} {size} tiled"] = tile_jpeg(content)
    for subsampling in range(3):
        picture = make_picture(60, 75, seed=subsampling)
        files[f"progressive {subsampling}"] = by_pillow(picture, progressive=True, subsampling=subsampling)
    return files


@pytest.mark.parametrize("resampling", get_args(Resampling))
def test_crops_of_kept_images_equal_those_of_the_files(resampling: Resampling) -> None:
    random = np.random.default_rng(get_args(Resampling).index(resampling))
    cache, files = make_cache(), make_files()
    for round_number in range(4):
        plain = [open_image(content) for content in files.values()]
        kept = [open_image(content, cache=cache) for content in files.values()]
        plan = draw_plan([picture.size for picture in plain], (40, 40), resampling, random)
        expected, found = render_chunk(plain, plan), render_chunk(kept, plan)
        for name, one, other in zip(files, found.images, expected.images, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
        assert set(found.decoder_names) == ({"kernel"} if round_number == 0 else {"cache"})


@pytest.mark.parametrize("orientation", TURNS)
def test_kept_images_stay_upright(orientation: int) -> None:
    cache = make_cache()
    content = by_pillow(make_picture(40, 61), exif=exif_of(orientation).tobytes())
    size = open_image(content, orientation="apply").size
    plan = draw_plan([size] * 2, (30, 30), "bilinear", np.random.default_rng(orientation))
    expected = render_chunk([open_image(content, orientation="apply")] * 2, plan)
    for name in ("kernel", "cache"):
        found = render_chunk([open_image(content, orientation="apply", cache=cache) for _ in range(2)], plan)
        assert found.decoder_names[0] == name
        for one, other in zip(found.images, expected.images, strict=True):
            np.testing.assert_array_equal(one, other)


def test_the_memory_is_bounded_and_what_does_not_fit_is_decoded() -> None:
    cache = make_cache(MIN_BYTES)
    files = [by_pillow(make_picture(200, 220, seed=seed)) for seed in range(40)]
    for _ in range(2):
        found = render(*files, cache=cache)
        for one, other in zip(found.images, render(*files).images, strict=True):
            np.testing.assert_array_equal(one, other)
        assert cache.num_used_bytes <= MIN_BYTES
    assert 0 < found.decoder_names.count("cache") < 40


def test_only_jpegs_that_the_kernel_decodes_are_kept_and_the_limit_of_pixels_holds_for_these() -> None:
    cache, picture = make_cache(), make_picture(30, 40)
    used = cache.num_used_bytes
    for content in (save(picture, "PNG"), save(picture, "PPM"), by_pillow(picture[..., [0, 1, 2, 0]])) * 2:
        assert render(content, cache=cache).decoder_names != ["cache"]
    assert cache.num_used_bytes == used
    kept = by_pillow(picture)
    render(kept, cache=cache)
    assert cache.find(find_key(kept)) is not None
    assert_raises(TooManyPixels, None, open_image, kept, max_pixels=1199, cache=cache)


def test_a_damaged_image_is_never_kept() -> None:
    cache, content = make_cache(), by_pillow(make_picture(90, 120), quality=95)
    damaged = content[: len(content) // 2] + bytes(50) + content[len(content) // 2 + 50 :]
    assert_raises(ValueError, ".+", render, damaged, cache=cache)
    assert cache.find(find_key(damaged)) is None


# Processes


def test_copies_and_processes_share_the_memory_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    content = by_pillow(make_picture(30, 40))
    (tmp_path / "image.jpg").write_bytes(content)
    cache = make_cache()
    script = """if True:
        import pickle, sys
        from pathlib import Path
        from shardio.images import CropPlan, open_image, render_chunk, sizes_of
        cache = pickle.loads(bytes.fromhex(sys.argv[1]))
        opened = open_image(Path(sys.argv[2]).read_bytes(), cache=cache)
        print(render_chunk([opened], CropPlan.whole(sizes_of([opened]))).decoder_names, cache.num_used_bytes)
    """
    arguments = [sys.executable, "-c", script, pickle.dumps(cache).hex(), str(tmp_path / "image.jpg")]
    first, second = (subprocess.run(arguments, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first.startswith("['kernel'")
    assert second.startswith("['cache'")
    assert second.split()[-1] == str(cache.num_used_bytes)
    copied = pickle.loads(pickle.dumps(cache))
    assert copied.find(find_key(content)) is not None
    name = cache._name
    del cache, copied
    alone = DecodedCache(1 << 24, name)
    assert alone.find(find_key(content)) is None  # The last process that had the memory open has closed it.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_images(root / "images", classes=3, per_class=16, width=70, height=50)
    write_mixed(root / "images")
    shardio.pack(root / "images", root / "packed", max_shard_samples=17)
    return root


SETTINGS: dict[str, dict[str, Any]] = {
    "random crop": {},
    "edited": {"transform": Compose([RandomResizedCrop(24, antialias=True), ColorJitter(0.4, 0.4, 0.4, 0.1)])},
    "several": {"transform": MultiCrop([CROP, RandomResizedCrop(16)])},
    "a function": {"transform": Compose([lambda image: image[::-1, 5:].copy(), CenterCrop(20)])},
    "upright": {"orientation": "apply"},
    "Pillow": {"decode": "pil", "transform": lambda image: np.asarray(image.crop((3, 2, 40, 30)))},
    "unverified": {"verify": "off"},  # A folder has no checksums.
}
CASES = [*itertools.product([ShardDataset, ShardMapDataset], SETTINGS)]
CASES += [(ImageFolder, name) for name in SETTINGS if name != "unverified"]


def read_epochs(
    kind: Any, data: Path, *, cache: str | None, num_workers: int = 0, transform: Any = CROP, **options: Any
) -> tuple[list[Any], DataLoader[Any]]:
    source = data / ("images" if kind is ImageFolder else "packed")
    order = {"shuffle": True} if kind is ShardDataset else {}
    dataset = kind(source, transform=transform, decoded_cache=cache, **order, **options)
    sampler = None if kind is ShardDataset else EpochSampler(dataset)
    loader = DataLoader(dataset, 7, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)
    return [column for _ in range(3) for batch in loader for column in batch], loader


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_batches_equal_those_without_a_cache(kind: Any, name: str, data: Path) -> None:
    expected, _ = read_epochs(kind, data, cache=None, **SETTINGS[name])
    found, loader = read_epochs(kind, data, cache="16MB", **SETTINGS[name])
    assert_equal(found, expected)
    if "decode" not in SETTINGS[name]:
        counts = loader.stats().num_images_by_decoder  # These are the counts of the last epoch.
        assert counts == {"kernel": 0, "device": 0, "cache": 55, "libjpeg": 2, "raw": 0, "pillow": 3}


@pytest.mark.slow
def test_worker_processes_share_a_cache_even_if_they_are_killed(data: Path) -> None:
    expected, _ = read_epochs(ShardDataset, data, cache=None)
    found, loader = read_epochs(ShardDataset, data, cache="16MB", num_workers=2)
    assert_equal(found, expected)
    assert loader.stats().num_images_by_decoder["cache"] == 55
    dataset = ShardDataset(data / "packed", transform=CROP, decoded_cache="17MB", shuffle=True)
    loader, found = DataLoader(dataset, 7, num_workers=2, persistent_workers=True), []
    with warns_of_deaths():
        for number, batch in ((number, batch) for _ in range(3) for number, batch in enumerate(loader)):
            if number % 4 == 1:
                kill_worker_processes()
            found += batch
    assert_equal(found, expected)


@pytest.mark.slow
def test_torchs_worker_processes_share_a_cache_that_outlives_them(data: Path) -> None:
    dataset = ShardMapDataset(data / "packed", transform=CROP, decoded_cache="22MB")
    cache = dataset.decoder.decoded_cache
    assert cache is not None
    used = [cache.num_used_bytes]
    for _ in range(2):
        for _ in torch.utils.data.DataLoader(dataset, 7, num_workers=2):
            pass
        used.append(cache.num_used_bytes)
    assert used[0] < used[1] == used[2]


def test_two_ranks_share_a_cache(data: Path) -> None:
    options: dict[str, Any] = {"transform": CROP, "decoded_cache": "18MB", "shuffle": True, "world_size": 2}
    loaders = [DataLoader(ShardDataset(data / "packed", rank=rank, **options), 4) for rank in range(2)]
    num_decoded = list[int]()
    for _ in range(2):
        assert [len(list(loader)) for loader in loaders] == [8, 8]
        num_decoded.append(sum(loader.stats().num_images_by_decoder["kernel"] for loader in loaders))
    # Each loader makes its first sample twice, to learn its shape. In the second epoch, each rank reads samples
    # that the other rank has decoded.
    assert num_decoded == [55 - 2, 0]


@pytest.mark.parametrize(
    ("size", "message"),
    [("1kB", f"decoded_cache must be from {MIN_BYTES} bytes"), ("9999TB", "this machine"), ("much", "decoded_cache")],
)
def test_a_size_out_of_range_is_an_error(size: str, message: str, data: Path) -> None:
    assert_raises(ValueError, message, ShardDataset, data / "packed", decoded_cache=size)


def test_without_a_kernel_a_warning_says_why(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.images.decoded_cache.find_functions", lambda: None)
    with pytest.warns(RuntimeWarning, match="decoded_cache is not used"):
        dataset = ShardDataset(data / "packed", decoded_cache="16MB")
    assert dataset.decoder.decoded_cache is None


def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"shardio-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    cache = make_cache()
    assert cache.find(1) is None
    assert not list(folder.iterdir())
