"""Compose, MultiCrop and choices: steps run in order, draw independently, and give the same pixels as single steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import reduce
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from shardio import DataLoader, ImageFolder, ShardDataset, ShardMapDataset, transforms as tr
from shardio.images import CropPlan, DecodeError, PlannedCrop, RenderedImages, open_image, render_chunk, render_crops
from shardio.images.jpeg import Box
from shardio.images.tiling import tile_jpeg
from shardio.kernel import find_kernel
from shardio.order import derive_rng_key
from shardio.transforms.compose import keys_of_inner
from tests.images import naive
from tests.images.jpeg_files import by_pillow
from tests.images.pictures import Array, make_picture, read_by_pillow, save
from tests.transforms.inputs import make_noise, make_rng_keys


def apply(transform: Callable[[Any], Any], images: list[Any], seed: int = 0) -> list[Any]:
    return tr.apply_transform(transform, images, make_rng_keys(len(images), seed))


def are_equal(a: Any, b: Any) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


def test_steps_run_in_their_order_also_nested() -> None:
    steps: list[Any] = [tr.Resize(30), tr.CenterCrop((20, 26)), tr.RandomHorizontalFlip(1.0), tr.Resize((9, 8))]
    image = make_noise(40, 60)
    expected = reduce(lambda image, step: step(image), steps, image)
    for nested in (steps, [steps[0], tr.Compose(steps[1:3]), steps[3]], [tr.Compose([tr.Compose(steps)])]):
        np.testing.assert_array_equal(tr.Compose(nested)(image), expected)
    assert are_equal(apply(tr.Compose([]), [image]), [image])


def test_a_foreign_callable_gets_the_array_and_the_next_transform_its_result() -> None:
    received: list[NDArray[np.uint8]] = []

    def invert(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        received.append(image)
        return 255 - image

    images = [make_noise(20, 30, seed) for seed in range(3)]
    results = apply(tr.Compose([tr.CenterCrop(10), invert, tr.Resize(10)]), images)
    assert are_equal(received, [tr.CenterCrop(10)(image) for image in images])
    assert are_equal(results, [255 - tr.CenterCrop(10)(image) for image in images])
    assert apply(lambda image: image.shape[1], images) == [30, 30, 30]


@pytest.mark.parametrize("nest", [lambda flip: flip, lambda flip: tr.Compose([flip])], ids=["flat", "nested"])
def test_two_equal_transforms_draw_independently(nest: Any) -> None:
    """If both flips drew the same numbers, they would always undo each other."""
    images, flip = [make_noise(4, 6, seed) for seed in range(2000)], tr.RandomHorizontalFlip()
    results = apply(tr.Compose([nest(flip), nest(flip)]), images)
    share = np.mean([np.array_equal(result, image) for result, image in zip(results, images, strict=True)])
    assert 0.45 < share < 0.55


@pytest.mark.parametrize("max_bytes", [1, 4 * 3 * 16 * 16, 2**25])
def test_callables_get_images_in_small_groups(max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [make_noise(40, 30, seed) for seed in range(10)]
    transform = tr.Compose([tr.RandomResizedCrop(16), np.copy])
    expected = apply(transform, images)
    sizes = list[int]()

    def render(pictures: list[Any], plan: CropPlan) -> RenderedImages:
        sizes.append(len(pictures))
        return render_chunk(pictures, plan)

    monkeypatch.setattr("shardio.transforms.compose.MAX_RENDERED_BYTES", max_bytes)
    monkeypatch.setattr("shardio.transforms.annotations.render_chunk", render)
    assert are_equal(apply(transform, images), expected)
    assert sizes == {1: [3, 3, 3, 1], 4 * 3 * 16 * 16: [4, 4, 2], 2**25: [10]}[max_bytes]


class Inverted(tr.CenterCrop):
    """A crop that also inverts the pixels."""

    def apply(self, image: NDArray[np.uint8], parameters: Any) -> NDArray[np.uint8]:
        return 255 - super().apply(image, parameters)


def test_a_subclass_may_override_apply_and_gets_an_array_also_after_a_tensor() -> None:
    image = make_noise(20, 30)
    expected = 255 - tr.CenterCrop(8)(image)
    np.testing.assert_array_equal(Inverted(8)(image), expected)
    np.testing.assert_array_equal(tr.Compose([Inverted(8), tr.RandomHorizontalFlip(0)])(image), expected)
    result = tr.Compose([lambda array: torch.from_numpy(array).permute(2, 0, 1), Inverted(8)])(image)
    np.testing.assert_array_equal(result, expected)


def test_an_image_that_an_earlier_transform_made_unusable_is_named_with_a_remedy() -> None:
    scaled = tr.Compose([lambda image: np.float32(image), tr.CenterCrop(8)])
    with pytest.raises(TypeError, match=r"got float32 \[20, 30, 3\]: convert the image first"):
        scaled(make_noise(20, 30))
    with pytest.raises(TypeError, match=r"got Image: convert the image first, .* decode='array'"):
        tr.CenterCrop(8)(Image.fromarray(make_noise(20, 30)))


def test_a_pipeline_equals_its_steps_one_by_one() -> None:
    steps: list[Any] = [tr.RandomResizedCrop(32), tr.ColorJitter(0.4, 0.4, 0.4, 0.1), tr.RandomGrayscale(0.3)]
    steps += [tr.RandomHorizontalFlip(), tr.RandomSolarize(128), tr.CenterCrop(30), tr.RandomEqualize()]
    images, keys = [make_noise(40, 30 + i) for i in range(12)], make_rng_keys(12)
    results: list[Any] = images
    for index, step in enumerate(steps):
        results = tr.apply_transform(step, results, derive_rng_key(keys, np.array([index], np.uint64)))
    assert are_equal(tr.apply_transform(tr.Compose(steps), images, keys), results)


# Choices.

KEYS = make_rng_keys(12_000)
THREE: list[Any] = [tr.RandomSolarize(128, 1), tr.GaussianBlur(3, 1.0), tr.RandomGrayscale(1)]


def shrink(image: Any) -> Any:
    return image[::2]


def test_transforms_are_applied_with_probability_p() -> None:
    for p in (0.0, 0.3, 1.0):
        numbers = tr.RandomApply(THREE, p).choose(KEYS)
        assert set(map(tuple, numbers.tolist())) <= {(0, 1, 2), (-1, -1, -1)}
        assert (numbers[:, 0] == 0).mean() == pytest.approx(p, abs=0.02)


def test_each_transform_is_chosen_with_its_weight() -> None:
    def count(*args: Any, **options: Any) -> Counter[int]:
        return Counter(tr.RandomChoice(*args, **options).choose(KEYS)[:, 0].tolist())

    assert count(THREE) == pytest.approx(dict.fromkeys(range(3), 4000), rel=0.05)
    assert count(THREE, p=[3, 0, 1]) == pytest.approx({0: 9000, 2: 3000}, rel=0.05)
    assert set(count([tr.RandomInvert()] * 11, p=[0.1] * 10 + [0.0])) == set(range(10))


def test_all_orders_are_equally_frequent() -> None:
    orders = Counter(map(tuple, tr.RandomOrder(THREE).choose(KEYS).tolist()))
    assert orders == pytest.approx(dict.fromkeys(permutations(range(3)), 2000), rel=0.1)


def by_hand(choice: Any, images: list[Any], keys: Any) -> list[Any]:
    numbers, results = choice.choose(keys), []
    for row, image in enumerate(images):
        for number in numbers[row].tolist():
            if number >= 0:
                own_key = keys_of_inner(keys, number)[row : row + 1]
                (image,) = tr.apply_transform(choice.transforms[number], [image], own_key)
        results.append(image)
    return results


JITTER, GRAY = tr.ColorJitter(0.4, 0.4, 0.4, 0.1), tr.Compose([tr.RandomGrayscale(0.5), tr.GaussianBlur(5)])
SMALL_CROP = tr.Compose([tr.Resize(9), tr.RandomCrop(7)])
OF_PIXELS: list[Any] = [JITTER, GRAY, tr.RandomSolarize(128, 0.7)]
OF_ANYTHING: list[Any] = [SMALL_CROP, shrink, tr.ColorJitter(0.4), tr.RandomResizedCrop(8)]


@pytest.mark.parametrize("inner", [OF_PIXELS, OF_ANYTHING], ids=["pixels", "anything"])
@pytest.mark.parametrize(
    "make", [tr.RandomApply, tr.RandomChoice, tr.RandomOrder, lambda inner: tr.RandomApply([tr.RandomOrder(inner)])]
)
def test_images_are_those_of_the_chosen_transforms(make: Any, inner: list[Any]) -> None:
    choice, keys = make(inner), make_rng_keys(24, seed=3)
    images = [make_noise(20 + i, 30) for i in range(24)]
    found = tr.apply_transform(choice, images, keys)
    assert are_equal(found, by_hand(choice, images, keys))
    assert are_equal(tr.apply_transform(choice, images[5:6], keys[5:6]), found[5:6])


def test_functions_in_a_choice_are_found() -> None:
    assert tr.others_in(tr.Compose([tr.RandomChoice([tr.RandomApply(OF_ANYTHING), *THREE])])) == [shrink]


def test_an_error_of_an_inner_transform_names_its_row_or_its_sample(packed: Path) -> None:
    images = [make_noise(30, 30), make_noise(12, 30), make_noise(30, 30)]
    with pytest.raises(DecodeError) as refused:
        tr.apply_transform(tr.RandomApply([tr.RandomCrop(20)], p=1), images, make_rng_keys(3))
    assert refused.value.row == 1
    transform = tr.Compose([tr.RandomResizedCrop(24), tr.RandomApply([tr.CenterCrop(12), {}.__getitem__], p=1)])
    with pytest.raises(TypeError, match="unhashable") as caught:
        next(iter(ShardDataset(packed, fields=("image",), transform=transform)))
    assert any("while transforming sample" in note for note in getattr(caught.value, "__notes__", [str(caught.value)]))


# MultiCrop.

LARGE = tr.Compose(
    [tr.RandomResizedCrop(40, scale=(0.4, 1.0), interpolation="bicubic", antialias=True), tr.RandomHorizontalFlip()]
)
SMALL = tr.Compose([tr.RandomResizedCrop(16, scale=(0.05, 0.4)), tr.RandomHorizontalFlip()])
CROPS = tr.MultiCrop([LARGE, LARGE, SMALL, SMALL, SMALL, tr.Compose([tr.Resize(30), tr.CenterCrop(24)])])
SIZES = [(90, 120), (60, 61), (200, 100), (33, 47), (75, 140), (48, 48), (101, 99)]


def render(transform: tr.MultiCrop, contents: list[bytes], rng_keys: Any) -> list[RenderedImages]:
    planned = tr.plan_crops(transform, [open_image(content) for content in contents], rng_keys)
    crops = [PlannedCrop(pictures, plan) for pictures, plan in planned if plan is not None]
    return render_crops(crops, [None] * len(planned))


def expected_crops(images: list[Array], transform: tr.MultiCrop, rng_keys: Any) -> list[list[Array]]:
    """Return each transform's crops, computed from decoded images in plain code."""
    keys = [derive_rng_key(rng_keys, np.array([i], np.uint64)) for i in range(len(transform.transforms))]
    steps: list[list[Any]] = [getattr(each, "transforms", [each]) for each in transform.transforms]
    return [naive.transform_all(own, images, key) for own, key in zip(steps, keys, strict=True)]


def test_each_transform_draws_its_own_crops_from_the_images() -> None:
    images, keys = [make_picture(*size) for size in SIZES], make_rng_keys(len(SIZES))
    rendered = render(CROPS, [save(image, "PNG") for image in images], keys)
    for crops, expected in zip(rendered, expected_crops(images, CROPS, keys), strict=True):
        assert are_equal(crops.images, expected)
    assert not np.array_equal(rendered[0].images[0], rendered[1].images[0])


@pytest.mark.parametrize("tile", [tile_jpeg, bytes], ids=["tiled", "untiled"])
def test_the_kernel_decodes_each_file_once(tile: Callable[[bytes], bytes]) -> None:
    files, keys = [by_pillow(make_picture(*size)) for size in SIZES], make_rng_keys(len(SIZES))
    contents, kernel = [tile(file) for file in files], find_kernel()
    assert kernel is not None
    with mock.patch.object(kernel, "decode", wraps=kernel.decode) as decode:
        rendered = render(CROPS, contents, keys)
    assert [call.args[0] for call in decode.call_args_list] == [contents]
    assert rendered[0].decoder_names == ["kernel"] * len(files)
    expected = expected_crops([read_by_pillow(file) for file in files], CROPS, keys)
    for made, wanted in zip(rendered[:2], expected[:2], strict=True):
        assert are_equal(made.images, wanted)


def test_a_window_outside_its_image_is_black_and_changes_no_other_crop() -> None:
    content = tile_jpeg(by_pillow(make_picture(64, 64)))
    whole = read_by_pillow(content)
    transform = tr.MultiCrop([tr.CenterCrop(40), tr.Compose([tr.CenterCrop((90, 4)), tr.CenterCrop((4, 90))])])
    one, other = render(transform, [content], make_rng_keys(1))
    np.testing.assert_array_equal(one.images[0], naive.crop(whole, Box(12, 12, 40, 40)))
    assert are_equal(other.images, apply(transform.transforms[1], [whole]))


def test_samples_hold_tuples_batches_lists_and_statistics_each_image_once(images: Path, packed: Path) -> None:
    transform = tr.MultiCrop([tr.CenterCrop(9), tr.CenterCrop(5)])
    for dataset in (ShardDataset(packed, transform=transform), ImageFolder(images, transform=transform)):
        crops, label = next(iter(dataset))
        assert [tuple(crop.shape) for crop in crops] == [(3, 9, 9), (3, 5, 5)]
        assert label in range(3)
    loader = DataLoader(ShardMapDataset(packed, transform=transform), batch_size=8)
    assert [[len(crop) for crop in crops] for crops, _ in loader] == [[8, 8], [8, 8], [5, 5]]
    assert sum(loader.stats().num_images_by_decoder.values()) == 21


def test_a_call_uses_torchs_generator_and_gives_as_many_crops_as_are_counted() -> None:
    image = make_picture(80, 80)
    torch.manual_seed(1)
    first = CROPS(image)
    assert [crop.shape[0] for crop in first] == [40, 40, 16, 16, 16, 24]
    torch.manual_seed(1)
    assert are_equal(list(first), list(CROPS(image)))
    assert not np.array_equal(first[0], CROPS(image)[0])
    assert (tr.count_crops(CROPS), tr.count_crops(LARGE)) == (6, None)
