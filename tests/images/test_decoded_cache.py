"""The decoded cache: crops of kept images equal those of the files, in any process, however full the cache is."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

import shardio
from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.images import CropPlan, DecodedCache, Resampling, TooManyPixels, open_image, render_chunk, sizes_of
from shardio.images.decoded_cache import MIN_BYTES, find_key
from shardio.images.tiling import tile_jpeg
from shardio.transforms import CenterCrop, ColorJitter, Compose, MultiCrop, RandomHorizontalFlip, RandomResizedCrop
from tests.faults.test_killed_workers import kill_worker_processes
from tests.faults.worker_processes import warns_of_deaths
from tests.images.crop_laws import random_boxes
from tests.images.jpeg_files import SAMPLINGS, by_pillow, make_jpeg
from tests.images.pictures import TURNS, exif_of, make_picture, save
from tests.raising import assert_raises
from tests.servers.web_folder import serve_folder
from tests.sources import write_images, write_mixed

CROP = Compose([RandomResizedCrop(24), RandomHorizontalFlip()])


def make_cache(num_bytes: int = 1 << 24) -> DecodedCache:
    return DecodedCache(num_bytes, uuid.uuid4().hex)


def make_files() -> dict[str, bytes]:
    """Return JPEGs of all samplings, untouched, tiled and progressive."""
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
        boxes = np.array([random_boxes(*picture.size, 1, random)[0] for picture in plain])
        sizes = np.where(random.random((len(plain), 1)) < 0.3, boxes[:, 2:], random.integers(1, 90, (len(plain), 2)))
        windows = np.concatenate([random.integers(0, np.maximum(sizes // 2, 1)), np.full_like(sizes, 40)], axis=1)
        flips = random.random(len(plain)) < 0.5
        plan = CropPlan(box=boxes, size=sizes, window=windows, flip=flips, resampling=resampling)
        expected, found = render_chunk(plain, plan), render_chunk(kept, plan)
        for name, one, other in zip(files, found.images, expected.images, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
        assert set(found.decoder_names) == ({"kernel"} if round_number == 0 else {"cache"})


@pytest.mark.parametrize("orientation", TURNS)
def test_kept_images_stay_upright(orientation: int) -> None:
    cache = make_cache()
    content = by_pillow(make_picture(40, 61), exif=exif_of(orientation).tobytes())
    boxes = np.array(
        random_boxes(*open_image(content, orientation="apply").size, 2, np.random.default_rng(orientation))
    )
    plan = CropPlan.whole(boxes[:, 2:])
    plan = CropPlan(box=boxes, size=plan.size, window=plan.window, flip=plan.flip)
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
        pictures = [open_image(content, cache=cache) for content in files]
        plan = CropPlan.whole(sizes_of(pictures))
        found = render_chunk(pictures, plan)
        for one, content in zip(found.images, files, strict=True):
            np.testing.assert_array_equal(
                one, render_chunk([open_image(content)], CropPlan.whole(plan.size[:1])).images[0]
            )
        assert cache.num_used_bytes <= MIN_BYTES
    assert 0 < found.decoder_names.count("cache") < 40


def test_only_jpegs_that_the_kernel_decodes_are_kept() -> None:
    cache = make_cache()
    picture = make_picture(30, 40)
    used = cache.num_used_bytes
    for content in (save(picture, "PNG"), save(picture, "PPM"), by_pillow(picture[..., [0, 1, 2, 0]])):
        for _ in range(2):
            opened = open_image(content, cache=cache)
            assert render_chunk([opened], CropPlan.whole(sizes_of([opened]))).decoder_names != ["cache"]
    assert cache.num_used_bytes == used


def test_the_limit_of_pixels_holds_for_kept_images() -> None:
    cache, content = make_cache(), by_pillow(make_picture(30, 40))
    opened = open_image(content, cache=cache)
    render_chunk([opened], CropPlan.whole(sizes_of([opened])))
    assert cache.find(find_key(content)) is not None
    with pytest.raises(TooManyPixels):
        open_image(content, max_pixels=1199, cache=cache)


def test_a_damaged_image_is_never_kept() -> None:
    cache, content = make_cache(), by_pillow(make_picture(90, 120), quality=95)
    damaged = content[: len(content) // 2] + bytes(50) + content[len(content) // 2 + 50 :]
    opened = open_image(damaged, cache=cache)
    with pytest.raises(ValueError, match=r".+"):
        render_chunk([opened], CropPlan.whole(sizes_of([opened])))
    assert cache.find(find_key(damaged)) is None


# ----------------------------------------------------------------------------------------------------------- Processes


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


TRANSFORMS: dict[str, Any] = {
    "random crop": CROP,
    "edited": Compose([RandomResizedCrop(24, antialias=True), ColorJitter(0.4, 0.4, 0.4, 0.1)]),
    "several": MultiCrop([CROP, RandomResizedCrop(16)]),
    "a function": Compose([lambda image: image[::-1, 5:].copy(), CenterCrop(20)]),
}


def read_epochs(
    kind: Any, data: Path, transform: Any, *, cache: str | None, num_workers: int = 0, **options: Any
) -> tuple[list[torch.Tensor], DataLoader[Any]]:
    source = data / ("images" if kind is ImageFolder else "packed")
    order = {"shuffle": True} if kind is ShardDataset else {}
    dataset = kind(source, transform=transform, decoded_cache=cache, **order, **options)
    sampler = None if kind is ShardDataset else EpochSampler(dataset)
    loader = DataLoader(dataset, 7, sampler=sampler, num_workers=num_workers, persistent_workers=num_workers > 0)
    batches = list[torch.Tensor]()
    for _ in range(3):
        for images, labels in loader:
            batches += [*(images if isinstance(images, list) else [images]), labels]
    return batches, loader


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("kind", [ShardDataset, ShardMapDataset, ImageFolder])
def test_batches_equal_those_without_a_cache(kind: Any, name: str, data: Path) -> None:
    expected, _ = read_epochs(kind, data, TRANSFORMS[name], cache=None)
    found, loader = read_epochs(kind, data, TRANSFORMS[name], cache="16MB")
    assert_equal(found, expected)
    counts = loader.stats().num_images_by_decoder  # Of the last epoch.
    assert counts == {"kernel": 0, "device": 0, "cache": 55, "libjpeg": 2, "raw": 0, "pillow": 3}


@pytest.mark.parametrize("options", [{"orientation": "apply"}, {"decode": "pil"}, {"verify": "off"}])
def test_batches_equal_those_without_a_cache_with_other_settings(options: Any, data: Path) -> None:
    transform = None if "decode" in options else CROP
    batches = []
    for cache in (None, "16MB"):
        dataset = ShardDataset(data / "packed", transform=transform, decoded_cache=cache, shuffle=True, **options)
        batches.append([np.asarray(image).copy() for _ in range(2) for image, _ in dataset])
    for one, other in zip(*batches, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_worker_processes_share_a_cache_even_if_they_are_killed(data: Path) -> None:
    expected, _ = read_epochs(ShardDataset, data, CROP, cache=None)
    found, loader = read_epochs(ShardDataset, data, CROP, cache="16MB", num_workers=2)
    assert_equal(found, expected)
    assert loader.stats().num_images_by_decoder["cache"] == 55
    dataset = ShardDataset(data / "packed", transform=CROP, decoded_cache="17MB", shuffle=True)
    loader, batches = DataLoader(dataset, 7, num_workers=2, persistent_workers=True), list[torch.Tensor]()
    with warns_of_deaths():
        for _ in range(3):
            for number, (images, labels) in enumerate(loader):
                if number % 4 == 1:
                    kill_worker_processes()
                batches += [images, labels]
    assert_equal(batches, expected)


@pytest.mark.slow
def test_images_from_a_web_server_are_kept(data: Path) -> None:
    expected, _ = read_epochs(ShardDataset, data, CROP, cache=None)
    with serve_folder(data / "packed") as (url, _):
        dataset = ShardDataset(url, transform=CROP, shuffle=True, decoded_cache="19MB")
        loader = DataLoader(dataset, 7)
        found = [column for _ in range(3) for batch in loader for column in batch]
    assert_equal(found, expected)
    assert loader.stats().num_images_by_decoder["cache"] == 55


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


RANK = """
import sys
import shardio
from shardio.transforms import RandomResizedCrop

rank = int(sys.argv[2])
dataset = shardio.ShardDataset(
    sys.argv[1], transform=RandomResizedCrop(24), decoded_cache="18MB", shuffle=True, rank=rank, world_size=2
)
loader = shardio.DataLoader(dataset, 4)
for _ in range(2):
    list(loader)
    print(loader.stats().num_images_by_decoder["kernel"], flush=True)
    input()
"""


def test_two_ranks_share_a_cache(data: Path) -> None:
    arguments = [sys.executable, "-c", RANK, str(data / "packed")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    num_decoded = []
    with ExitStack() as stack:
        ranks = [stack.enter_context(subprocess.Popen([*arguments, str(rank)], **pipes)) for rank in range(2)]
        for _ in range(2):
            num_decoded.append(sum(int(rank.stdout.readline()) for rank in ranks if rank.stdout))
            for rank in ranks:
                print(file=rank.stdin, flush=True)
    assert [rank.returncode for rank in ranks] == [0, 0]
    # Each loader makes its first sample twice, to learn its shape. In the second epoch, each rank reads samples
    # that the other one has decoded.
    assert num_decoded == [55 - 2, 0]


def test_a_size_out_of_range_is_an_error(data: Path) -> None:
    for size, message in (
        ("1kB", f"decoded_cache must be from {MIN_BYTES} bytes"),
        ("9999TB", "memory of this machine"),
    ):
        assert_raises(ValueError, message, ShardDataset, data / "packed", decoded_cache=size)
    assert_raises(ValueError, "decoded_cache", ImageFolder, data / "images", decoded_cache="much")


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
