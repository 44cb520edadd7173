"""Masks, depth maps and second pictures are fields of a sample, and arrive as what their files store."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import shardio
from shardio import DataLoader, SampleError, ShardMapDataset
from shardio.transforms import CenterCrop, Compose, Mask
from tests.images.stored_values import make_values, write_png, write_tiff
from tests.sources import encode
from tests.tars import write_tar

NUM_SAMPLES, HEIGHT, WIDTH = 9, 80, 96
TORCHS: dict[str, Any] = {"multiprocessing_context": "fork"}
FIELDS = ("image", "masks.png", "depth.png", "right.jpg", "key")


def make_mask(number: int) -> PIL.Image.Image:
    values = np.random.default_rng(number).integers(0, 5, (HEIGHT, WIDTH), np.uint8)
    mask = PIL.Image.fromarray(values, "P")
    mask.putpalette(range(15))
    return mask


def make_depth(number: int) -> PIL.Image.Image:
    values = np.random.default_rng(number).integers(0, 1 << 16, (HEIGHT, WIDTH), np.uint16)
    return PIL.Image.fromarray(values)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed pictures with masks, depth maps and pictures from the right."""
    root = tmp_path_factory.mktemp("scenes")
    for folder in ("images", "masks", "depth", "right"):
        (root / "in" / folder).mkdir(parents=True)
    for number in range(NUM_SAMPLES):
        (root / f"in/images/{number}.jpg").write_bytes(encode(number, width=WIDTH, height=HEIGHT))
        (root / f"in/right/{number}.jpg").write_bytes(encode(number + 50, width=WIDTH, height=HEIGHT))
        make_mask(number).save(root / f"in/masks/{number}.png")
        make_depth(number).save(root / f"in/depth/{number}.png")
    shardio.pack(root / "in", root / "out", layout="pairs")
    return root


def read_pixels(path: Path) -> torch.Tensor:
    with PIL.Image.open(path) as image:
        return torch.from_numpy(np.array(image))


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1}, {"num_workers": 1, **TORCHS}], ids=str)
def test_fields_of_pictures_are_batched_as_stored(scenes: Path, options: dict[str, Any]) -> None:
    dataset = ShardMapDataset(scenes / "out", fields=FIELDS, transform=CenterCrop(64))
    for images, masks, depths, rights, keys in DataLoader(dataset, batch_size=4, **options):
        assert images.shape == (len(keys), 3, 64, 64)
        assert (masks.dtype, depths.dtype, rights.dtype) == (torch.uint8, torch.uint16, torch.uint8)
        for row, key in enumerate(keys):
            assert torch.equal(masks[row], read_pixels(scenes / f"in/masks/{key}.png"))
            assert torch.equal(depths[row], read_pixels(scenes / f"in/depth/{key}.png"))
            assert torch.equal(rights[row].permute(1, 2, 0), read_pixels(scenes / f"in/right/{key}.jpg"))


def save_array(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def test_values_of_every_type_arrive_whole_and_cropped(tmp_path: Path) -> None:
    shapes = {
        **dict.fromkeys(("flow.png", "colour.tif", "npy"), ("uint16", 3)),
        "ids.tif": ("uint32", 1),
        "height.tif": ("float64", 1),
        "change.tif": ("int8", 1),
        "half.npy": ("float16", 2),
        "big.npy": (">u4", 1),
    }
    stored = {
        name: [make_values(dtype, HEIGHT, WIDTH, *([channels] * (channels > 1)), seed=i) for i in range(4)]
        for name, (dtype, channels) in shapes.items()
    }
    writers: dict[str, Callable[[Any], bytes]] = {"png": write_png, "tif": write_tiff, "npy": save_array}
    members = [
        (f"{i}.{name}", writers[name.rpartition(".")[2]](values[i]))
        for i in range(4)
        for name, values in stored.items()
    ]
    members = sorted(members + [(f"{i}.jpg", encode(i, width=WIDTH, height=HEIGHT)) for i in range(4)])
    write_tar(tmp_path / "a.tar", members)
    crop = Compose([CenterCrop(64)], fields={"image": "image", **dict.fromkeys(shapes, Mask())})
    place = np.s_[:, 8:72, 16:80]
    for transform, of in ((None, np.s_[:]), (crop, place)):
        for num_workers in (0, 1):
            dataset = ShardMapDataset(tmp_path / "a.tar", fields=("image", *shapes), transform=transform)
            (batch,) = DataLoader(dataset, batch_size=4, num_workers=num_workers)
            for (name, values), found in zip(stored.items(), batch[1:], strict=True):
                expected = np.stack(values)[of]
                assert found.numpy().dtype == expected.dtype.newbyteorder("="), name
                np.testing.assert_array_equal(found.numpy(), expected, err_msg=name)


def crop_alike(sample: dict[str, Any]) -> dict[str, Any]:
    """Crop the image and its mask at one random place, as people train segmentation."""
    top, left = np.random.randint(HEIGHT - 32), np.random.randint(WIDTH - 32)  # as people do
    place = np.s_[top : top + 32, left : left + 32]
    cropped = {"image": sample["image"][place], "mask": sample["masks.png"][place]}
    return {**cropped, "top": top, "left": left, "key": sample["key"]}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_and_its_mask_are_cropped_alike(scenes: Path, num_workers: int) -> None:
    dataset = ShardMapDataset(scenes / "out", fields=("image", "masks.png", "key"), transform_sample=crop_alike)
    (batch,) = DataLoader(dataset, batch_size=NUM_SAMPLES, num_workers=num_workers)
    assert len(set(batch["top"].tolist())) > 3
    for row, (key, top, left) in enumerate(zip(batch["key"], batch["top"], batch["left"], strict=True)):
        place = np.s_[top : top + 32, left : left + 32]
        assert torch.equal(batch["mask"][row], read_pixels(scenes / f"in/masks/{key}.png")[place])
        assert torch.equal(batch["image"][row].permute(1, 2, 0), read_pixels(scenes / f"in/images/{key}.jpg")[place])


def modes_of(sample: dict[str, Any]) -> list[str]:
    return [sample[name].mode for name in FIELDS[:4]]


def test_pillow_images_keep_their_mode(scenes: Path) -> None:
    dataset = ShardMapDataset(scenes / "out", fields=FIELDS, decode="pil", transform_sample=modes_of)
    assert dataset[0] == ["RGB", "P", "I;16", "RGB"]


def test_bytes_come_on_demand(scenes: Path) -> None:
    dataset = ShardMapDataset(
        scenes / "out", fields=("jpg", "masks.png", "key"), decoders={"jpg": bytes, "masks.png": len}
    )
    content, num_bytes, key = dataset[3]
    assert content == (scenes / f"in/images/{key}.jpg").read_bytes()
    assert num_bytes == (scenes / f"in/masks/{key}.png").stat().st_size


def test_an_error_names_the_field_and_the_sample(scenes: Path, tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / "in" / folder).mkdir(parents=True)
    (tmp_path / "in/images/a.jpg").write_bytes(encode(1))
    file = io.BytesIO()
    make_mask(1).save(file, "PNG")
    (tmp_path / "in/masks/a.png").write_bytes(file.getvalue()[:-50])
    shardio.pack(tmp_path / "in", tmp_path / "out", layout="pairs", check=False)
    with pytest.raises(SampleError, match=r"field 'masks.png' of sample a in .* cannot be decoded") as caught:
        ShardMapDataset(tmp_path / "out", fields="masks.png")[0]
    assert caught.value.stage == "decode"
    too_large = ShardMapDataset(scenes / "out", fields="masks.png", max_pixels=HEIGHT * WIDTH - 1)
    with pytest.raises(SampleError, match=r"field 'masks.png' .* more than max_pixels=7679"):
        too_large[0]
