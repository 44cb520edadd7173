"""Batches whose tiles the device decodes are equal to those that workers decode.

Without a CUDA device, the processor runs the stages: the same code, compiled as C.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardio import DataLoader, ImageFolder, SampleError, ShardDataset, ShardMapDataset
from shardio.check import guard
from shardio.device import DevicePrefetcher
from shardio.device.tiles import ImagePreparation, TiledImages
from shardio.images.jpeg.head import read_head
from shardio.images.tiling import tile_jpeg
from shardio.loader.extension import find_extension
from shardio.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    MultiCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from tests.device.late_stream import prefetch_late
from tests.images.jpeg_files import by_pillow
from tests.images.pictures import make_picture, save
from tests.raising import assert_raises
from tests.tars import write_tar

needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CROP = RandomResizedCrop(96)
TRANSFORMS: dict[str, Any] = {
    "random crop": Compose([CROP, RandomHorizontalFlip()]),
    "antialiased": RandomResizedCrop((80, 112), antialias=True),
    "evaluation": Compose([Resize(110), CenterCrop(96)]),
    "edited": Compose([CROP, ColorJitter(0.4, 0.4, 0.4, 0.1)]),
    "several": MultiCrop([CROP, RandomResizedCrop(48), RandomResizedCrop(48)]),
    "a function": Compose([CROP, np.ascontiguousarray]),
}
NUM_TILED, NUM_OTHERS = 36, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiled JPEGs of several sizes, a few images that no device decodes, masks, and a folder of JPEGs."""
    root, members = tmp_path_factory.mktemp("data"), []
    for i in range(NUM_TILED + NUM_OTHERS):
        picture = make_picture(100 + 3 * i, 180 - 2 * i, seed=i)
        content = by_pillow(picture, quality=70)
        folder = root / "images" / f"class-{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.jpg").write_bytes(content)
        stored = tile_jpeg(content) if i < NUM_TILED else save(picture, "png")
        mask = save(Image.fromarray(picture[..., 0]), "png")
        members += [(f"{i:02}.cls", b"%d" % (i % 3)), (f"{i:02}.jpg", stored), (f"{i:02}.mask.png", mask)]
    (root / "packed").mkdir()
    write_tar(root / "packed" / "shard-000000.tar", members)
    return root


def make_loader(data: Path, transform: Any, *, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
    dataset = ShardDataset(data / "packed", transform=transform, shuffle=True, **options)
    return DataLoader(dataset, 7, num_workers=num_workers, persistent_workers=num_workers > 0)


def flatten(batches: Iterator[Any]) -> list[Any]:
    """Return the columns of batches, with the crops of a MultiCrop as separate columns."""
    columns = (column for batch in batches for column in batch)
    return [part for column in columns for part in (column if isinstance(column, list) else [column])]


def read(loader: Any, device: str, decode: Any, **options: Any) -> list[Any]:
    prefetcher = DevicePrefetcher(loader, device, decode=decode, **options)
    return [each.cpu() if isinstance(each, torch.Tensor) else each for each in flatten(iter(prefetcher))]


def assert_equal(found: list[Any], expected: list[Any], rtol: float = 0.0, atol: float = 0.0) -> None:
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
        else:
            assert one == other


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_pixels_equal_those_of_the_workers(name: str, num_workers: int, device: str, data: Path) -> None:
    transform = TRANSFORMS[name]
    expected = read(make_loader(data, transform), device, "workers")
    loader = make_loader(data, transform, num_workers=num_workers)
    assert_equal(read(loader, device, "device"), expected)
    counts = loader.stats().num_images_by_decoder
    num_tiled = 0 if name in ("edited", "a function") else NUM_TILED
    assert (counts["device"], counts["kernel"]) == (num_tiled, NUM_TILED - num_tiled)
    assert sum(counts.values()) == NUM_TILED + NUM_OTHERS
    loader.set_epoch(0)
    assert_equal(read(loader, device, "workers"), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("normalize", [None, NORMALIZE, ((0.5,), (0.25,))])
def test_images_are_normalized_and_cast_as_pixels_are(
    normalize: Any, dtype: Any, channels_last: bool, device: str, data: Path
) -> None:
    options: dict[str, Any] = {"normalize": normalize, "dtype": dtype, "channels_last": channels_last}
    one, other = (read(make_loader(data, CROP), device, decode, **options) for decode in ("device", "workers"))
    eps = 0.0 if dtype is None else torch.finfo(dtype).eps
    assert_equal(one, other, rtol=eps, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_labels_and_masks_come_along(device: str, data: Path) -> None:
    transform = Compose([CROP], fields={"image": "image", "mask.png": "mask"})
    fields = ("key", "image", "label", "mask.png")
    one, other = (read(make_loader(data, transform, fields=fields), device, decode) for decode in ("device", "workers"))
    assert_equal(one, other)


@pytest.mark.parametrize("kind", [ShardMapDataset, ImageFolder])
def test_map_style_datasets_are_decoded_too(kind: Any, data: Path) -> None:
    batches = []
    for decode in ("device", "workers"):
        dataset: Any = ImageFolder(data / "images", transform=CROP)  # These files have no tiles.
        if kind is ShardMapDataset:  # Bare images.
            dataset = ShardMapDataset(data / "packed", transform=CROP, fields="image")
        num_tiled = NUM_TILED if kind is ShardMapDataset else 0
        loader = DataLoader(dataset, 7, device="cpu", decode=decode, generator=torch.Generator().manual_seed(0))
        batches.append(flatten(iter(loader)) if kind is ImageFolder else list(loader))
        assert loader.stats().num_images_by_decoder["device"] == (num_tiled if decode == "device" else 0)
    assert_equal(batches[0], batches[1])


@pytest.mark.parametrize("device", DEVICES)
def test_batches_whose_images_need_much_memory_are_decoded_in_groups(
    device: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = read(make_loader(data, TRANSFORMS["several"]), device, "workers")
    for max_scratch in (1, 1 << 18):  # One image at a time, and a few at a time.
        monkeypatch.setattr("shardio.device.tiles.MAX_SCRATCH", max_scratch)
        assert_equal(read(make_loader(data, TRANSFORMS["several"]), device, "device"), expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none")
def test_the_program_does_not_wait_for_decoding(data: Path) -> None:
    with (loader := make_loader(data, CROP)).watch_memory(lambda memory: None, takes_tiles=True):
        tiles = next(iter(loader))[0].to(torch.device("cuda", 0))
    prepare = ImagePreparation(torch.device("cuda", 0), NORMALIZE, torch.bfloat16, channels_last=True)
    first = prepare.decode(tiles, [], is_final=True)
    torch.cuda.set_sync_debug_mode("error")  # From here on, waiting for the device raises an error.
    try:
        second = prepare.decode(tiles, [], is_final=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert torch.equal(first, second)


def test_a_late_stream_gets_whole_tiles(data: Path) -> None:
    expected = read(make_loader(data, CROP), "cpu", "workers")
    for seed in range(5):
        loader = make_loader(data, CROP, num_workers=2)
        assert_equal(flatten(iter(prefetch_late(loader, seed=seed, decode="device")[0])), expected)


def damage(data: Path, tmp_path: Path) -> tuple[Path, str]:
    """Write a tar in which the third image has a damaged tile. Return its folder and the image's key."""
    stored: Any = ShardMapDataset(data / "packed", fields=("key", "jpg"), decoders={"jpg": bytearray})
    members, damaged = [], stored[2][0]
    for key, content in (stored[i] for i in range(len(stored))):
        if key == damaged:
            start = read_head(bytes(content)).scan_start
            content[start + 20 : start + 40] = bytes(20)
        members.append((f"{key}.jpg", bytes(content)))
    write_tar(tmp_path / "shard-000000.tar", members)
    return tmp_path, damaged


@pytest.mark.parametrize("device", DEVICES)
def test_damage_is_named_as_on_the_cpu(device: str, data: Path, tmp_path: Path) -> None:
    folder, key = damage(data, tmp_path)
    errors = []
    for decode in ("workers", "device"):
        loader = DataLoader(ShardDataset(folder, transform=Resize((96, 96)), fields="image"), 7)
        batches = iter(DevicePrefetcher(loader, device, decode=decode))
        with pytest.raises(SampleError) as caught:
            list(batches)
        errors.append(caught.value)
        assert len(list(batches)) == len(loader) - 1, "the other batches follow"
    one, other = errors
    assert str(one) == str(other)
    assert (one.key, one.where, one.row, one.stage) == (other.key, other.where, other.row, other.stage)
    assert one.key == key


def test_images_that_differ_in_size_are_refused(data: Path, tmp_path: Path) -> None:
    for decode in ("workers", "device"):
        assert_raises(ValueError, "differ in size", read, make_loader(data, None), "cpu", decode)
    one, other = (
        read(DataLoader(ShardDataset(data / "packed", transform=Resize(96)), 1), "cpu", decode)
        for decode in ("workers", "device")
    )
    assert_equal(one, other)
    sizes = [(60, 80)] * 16 + [(60, 80 + i) for i in range(16)]  # The sizes in the first chunk are equal.
    contents = [tile_jpeg(by_pillow(make_picture(*size, seed=i), quality=50)) for i, size in enumerate(sizes)]
    write_tar(tmp_path / "a.tar", [(f"{i:02}.jpg", content) for i, content in enumerate(contents)])
    loader = DataLoader(ShardDataset(tmp_path, fields="image"), 32, num_workers=2)
    assert_raises(ValueError, "differ in size", list, DevicePrefetcher(loader, "cpu", decode="device"))


@pytest.mark.parametrize(("decode", "error"), [("gpu", "decode must be"), ("device", "decode='device' needs device=")])
def test_arguments_that_do_not_fit_are_refused(decode: Any, error: str, data: Path) -> None:
    with pytest.raises(ValueError, match=error):
        DataLoader(ShardDataset(data / "packed", transform=CROP), 7, decode=decode)


def test_where_pixels_are_compared_or_changed_the_workers_decode(data: Path) -> None:
    class Halved(DataLoader[Any]):
        def __iter__(self) -> Any:
            for images, labels in super().__iter__():
                yield images // 2, labels

    transform = Resize((96, 96))
    expected = read(make_loader(data, transform), "cpu", "workers")
    dataset = ShardDataset(data / "packed", transform=transform, shuffle=True)
    guarded: list[Any] = [
        DataLoader(dataset, 7, device="cpu", decode="device", check_duplicates=True),
        DevicePrefetcher(DataLoader(dataset, 7, check_duplicates=True), "cpu", decode="device"),
        DevicePrefetcher(guard(DataLoader(dataset, 7)), "cpu", decode="device"),
    ]
    for loader in guarded:
        assert_equal(flatten(iter(loader)), expected)
    halved = flatten(iter(DevicePrefetcher(Halved(dataset, 7), "cpu", decode="device")))
    assert_equal(halved, [each // 2 if each.ndim == 4 else each for each in expected])
    by_key = DevicePrefetcher(make_loader(data, CROP, fields=("image", "key")), "cpu", decode="device")
    assert sum(len(keys) for _, keys in guard(by_key, key=1)) == NUM_TILED + NUM_OTHERS


def test_images_that_only_the_cpu_decodes_are_decoded_there(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = read(make_loader(data, CROP), "cpu", "workers", normalize=NORMALIZE)
    decode = TiledImages.decode

    def find_damage(self: TiledImages, colors: Any) -> Any:
        decoded = decode(self, colors)
        decoded.is_damaged[1::3] = 1
        decoded.crops[0][1::3] = 0
        return decoded

    monkeypatch.setattr(TiledImages, "decode", find_damage)
    for num_workers in (0, 2):
        loader = make_loader(data, CROP, num_workers=num_workers)
        found = read(loader, "cpu", "device", normalize=NORMALIZE)
        assert_equal(found, expected, atol=1e-6)
    with pytest.raises(SampleError, match="image 1 of a batch cannot be decoded on the device"):
        read(make_loader(data, CROP), "cpu", "device", transform=lambda batch: batch)


def test_a_wrapper_gets_tiles_only_where_it_asked_and_threads_and_later_epochs_get_pixels_in_buffers(
    data: Path,
) -> None:
    loader, found = make_loader(data, CROP, num_workers=2), list[Any]()
    with loader.watch_memory(lambda memory: None, takes_tiles=True):
        thread = threading.Thread(target=lambda: found.append(next(iter(loader))[0]))
        thread.start()
        thread.join()
        found.append(next(iter(loader))[0])
    found.append(next(iter(loader))[0])
    assert [type(each) for each in found] == [torch.Tensor, TiledImages, torch.Tensor]
    assert len(found[1]) == 7
    assert sum(len(chunk) for chunk in found[1].chunks) < 7 * 96 * 96 * 3 / 2
    assert found[1].pin_memory is not None
    assert found[2].shape == (7, 3, 96, 96)
    executor: Any = find_extension(loader).find_executor(loader)  # type: ignore[union-attr]  # It has one.
    assert executor._buffers.layout.columns[0][1] == (96, 96, 3)
