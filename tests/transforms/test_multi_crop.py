"""MultiCrop: several crops of each image, in every way that a dataset is loaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import shardio
from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.images import PlannedCrop, RenderedImages, open_image, render_crops
from shardio.images.jpeg.regions import Box
from shardio.images.kernel import find_kernel
from shardio.images.tiling import tile_jpeg
from shardio.order import derive_rng_key
from shardio.transforms import (
    CenterCrop,
    Compose,
    MultiCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    apply_transform,
    count_crops,
    is_builtin,
    plan_crops,
)
from tests.images import naive
from tests.images.jpeg_files import by_pillow
from tests.images.pictures import Array, make_picture, read_by_pillow, save
from tests.transforms.inputs import make_rng_keys

LARGE = Compose(
    [RandomResizedCrop(40, scale=(0.4, 1.0), interpolation="bicubic", antialias=True), RandomHorizontalFlip()]
)
SMALL = Compose([RandomResizedCrop(16, scale=(0.05, 0.4)), RandomHorizontalFlip()])
TRANSFORM = MultiCrop([LARGE, LARGE, SMALL, SMALL, SMALL, Compose([Resize(30), CenterCrop(24)])])
SIDES = [40, 40, 16, 16, 16, 24]
SIZES = [(90, 120), (60, 61), (200, 100), (33, 47), (75, 140), (48, 48), (101, 99)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs, tiled and untiled, and a PNG, in two classes."""
    root = tmp_path_factory.mktemp("images")
    for i, size in enumerate(SIZES):
        (root / f"class{i % 2}").mkdir(exist_ok=True)
        content = by_pillow(make_picture(*size))
        path = root / f"class{i % 2}" / f"{i}.jpg"
        path.write_bytes(tile_jpeg(content) if i % 3 else content)
    (root / "class0" / "7.png").write_bytes(save(make_picture(50, 70), "PNG"))
    return root


@pytest.fixture(scope="module")
def packed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "out"
    shardio.pack(folder, out)
    return out


def _render(transform: MultiCrop, contents: list[bytes], rng_keys: Any) -> list[RenderedImages]:
    planned = plan_crops(transform, [open_image(content) for content in contents], rng_keys)
    crops = [PlannedCrop(pictures, plan) for pictures, plan in planned if plan is not None]
    return render_crops(crops, [None] * len(planned))


def _expected(images: list[Array], transform: MultiCrop, rng_keys: Any) -> list[list[Array]]:
    """Return the crops by transform, each computed on its own from decoded images."""
    return [
        naive.transform_all(
            _steps_of(each),
            images,
            derive_rng_key(rng_keys, np.array([i], np.uint64)),
        )
        for i, each in enumerate(transform.transforms)
    ]


def _steps_of(transform: Any) -> list[Any]:
    return list(transform.transforms) if isinstance(transform, Compose) else [transform]


def test_each_transform_draws_its_own_crops_from_the_images() -> None:
    images = [make_picture(*size) for size in SIZES]
    keys = make_rng_keys(len(images))
    rendered = _render(TRANSFORM, [save(image, "PNG") for image in images], keys)
    for crops, expected in zip(rendered, _expected(images, TRANSFORM, keys), strict=True):
        for one, other in zip(crops.images, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert not np.array_equal(rendered[0].images[0], rendered[1].images[0])


@pytest.mark.parametrize("kind", ["tiled", "untiled"])
def test_the_kernel_decodes_each_file_once(kind: str) -> None:
    files = [by_pillow(make_picture(*size)) for size in SIZES]
    decoded = [read_by_pillow(file) for file in files]
    contents = [tile_jpeg(file) for file in files] if kind == "tiled" else files
    keys = make_rng_keys(len(files))
    kernel = find_kernel()
    assert kernel is not None
    with mock.patch.object(kernel, "decode", wraps=kernel.decode) as decode:
        rendered = _render(TRANSFORM, contents, keys)
    assert [call.args[0] for call in decode.call_args_list] == [contents]
    assert rendered[0].decoder_names == ["kernel"] * len(files)
    for made, expected in zip(rendered[:2], _expected(decoded, TRANSFORM, keys)[:2], strict=True):
        for one, other in zip(made.images, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_holds_a_tensor_for_each_transform(packed: Path, num_workers: int) -> None:
    dataset = ShardMapDataset(packed, transform=TRANSFORM)
    loader = DataLoader(dataset, batch_size=3, num_workers=num_workers)
    batches = list(loader)
    assert [len(labels) for _, labels in batches] == [3, 3, 2]
    for images, labels in batches:
        assert [tuple(crop.shape) for crop in images] == [(len(labels), 3, side, side) for side in SIDES]
        assert all(crop.is_contiguous(memory_format=torch.channels_last) for crop in images)
    stats = loader.stats()
    assert sum(stats.num_images_by_decoder.values()) == 8  # Each image counts once.


def test_batches_are_the_same_in_every_way(packed: Path) -> None:
    """The calling process, shardio's worker processes, torch's workers, and torch's own loader."""
    own_code = MultiCrop([*TRANSFORM.transforms[:5], Compose([Resize(30), CenterCrop(24), _unchanged])])
    ways: list[tuple[Any, Any, int]] = [
        (DataLoader, TRANSFORM, 0),
        (DataLoader, TRANSFORM, 2),
        (DataLoader, own_code, 1),
        (torch.utils.data.DataLoader, TRANSFORM, 0),
    ]
    batches = []
    for kind, transform, num_workers in ways:
        dataset = ShardMapDataset(packed, transform=transform, fields=("image", "key"))
        dataset.set_epoch(0)  # torch's loader does not tell it.
        batches.append(list(kind(dataset, 3, sampler=EpochSampler(dataset), num_workers=num_workers)))
    for others in batches[1:]:
        for (images, keys), (other_images, other_keys) in zip(batches[0], others, strict=True):
            assert list(keys) == list(other_keys)
            for one, other in zip(images, other_images, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)


def _unchanged(image: Any) -> Any:
    return image


def test_samples_hold_tuples(folder: Path, packed: Path) -> None:
    transform = MultiCrop([CenterCrop(9), CenterCrop(5)])
    for dataset in (ShardDataset(packed, transform=transform), ImageFolder(folder, transform=transform)):
        crops, label = next(iter(dataset))
        assert [tuple(crop.shape) for crop in crops] == [(3, 9, 9), (3, 5, 5)]
        assert label in (0, 1)


def test_a_call_uses_torchs_generator() -> None:
    image = make_picture(80, 80)
    torch.manual_seed(1)
    first = TRANSFORM(image)
    assert [crop.shape for crop in first] == [(side, side, 3) for side in SIDES]
    torch.manual_seed(1)
    for one, other in zip(first, TRANSFORM(image), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(first[0], TRANSFORM(image)[0])


def test_what_can_be_asked_of_it() -> None:
    assert count_crops(TRANSFORM) == 6
    assert count_crops(LARGE) is None
    assert is_builtin(TRANSFORM)
    assert not is_builtin(MultiCrop([LARGE, _unchanged]))
    assert repr(MultiCrop([CenterCrop(3)])) == "MultiCrop([CenterCrop(size=(3, 3))])"
    assert repr(pickle.loads(pickle.dumps(TRANSFORM))) == repr(TRANSFORM)


def test_it_is_the_whole_transform() -> None:
    for container in (Compose, MultiCrop):
        with pytest.raises(TypeError, match=r"cannot be part of a Compose or of another MultiCrop: pass it to"):
            container([TRANSFORM])
    with pytest.raises(TypeError, match=r"write MultiCrop\(\[\.\.\.\]\)"):
        MultiCrop(CenterCrop(3))  # type: ignore[arg-type]  # It takes a list.
    with pytest.raises(ValueError, match="at least one"):
        MultiCrop([])
    with pytest.raises(TypeError, match="callable"):
        MultiCrop([3])  # type: ignore[list-item]  # It takes transforms.
    with pytest.raises(TypeError, match="Pillow"):
        ShardMapDataset("unused", decode="pil", transform=TRANSFORM)


def test_one_part_outside_does_not_matter_to_the_others() -> None:
    """A window that is not over its image is black, and is left to the libraries."""
    content = tile_jpeg(by_pillow(make_picture(64, 64)))
    whole = read_by_pillow(content)
    transform = MultiCrop([CenterCrop(40), Compose([CenterCrop((90, 4)), CenterCrop((4, 90))])])
    one, other = _render(transform, [content], make_rng_keys(1))
    np.testing.assert_array_equal(one.images[0], naive.crop(whole, Box(12, 12, 40, 40)))
    np.testing.assert_array_equal(
        other.images[0], apply_transform(transform.transforms[1], [whole], make_rng_keys(1))[0]
    )
