"""A crop plan gives the pixels of its transforms applied one after another to whole arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardio.images import CropPlan, DecodedPicture, DecodeError, open_image, render_chunk
from shardio.images.jpeg.regions import Box
from shardio.images.tiling import tile_jpeg
from shardio.transforms import (
    CenterCrop,
    Compose,
    Geometry,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    apply_transform,
)
from tests.images import naive
from tests.images.jpeg_files import by_pillow, noise
from tests.images.pictures import Array, make_picture, read_by_pillow, save
from tests.transforms.inputs import make_rng_keys

NUM_SEQUENCES = 40


def _assert_equal(results: list[Any], expected: list[Array], name: object) -> None:
    for row, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        np.testing.assert_array_equal(result, wanted, err_msg=f"row {row} of {name}")


def _sizes(random: np.random.Generator, count: int, smallest: int, largest: int) -> NDArray[np.int64]:
    return random.integers(smallest, largest + 1, (count, 2))


@pytest.mark.parametrize("seed", range(NUM_SEQUENCES))
def test_fused_transforms_of_arrays_and_pngs_equal_separate_ones(seed: int) -> None:
    """The images are small: in larger ones, OpenCV's resize of a mirrored image differs by 1 in places."""
    random = np.random.default_rng([1, seed])
    steps = naive.draw_steps(random, 1, 60)
    images = [noise(height, width) for height, width in _sizes(random, 4, 1, 70).tolist()]
    rng_keys = make_rng_keys(4, seed)
    expected = naive.transform_all(steps, images, rng_keys)
    _assert_equal(apply_transform(Compose(steps), images, rng_keys), expected, steps)
    pictures = [open_image(save(image, "PNG")) for image in images]
    _assert_equal(apply_transform(Compose(steps), pictures, rng_keys), expected, steps)


@pytest.mark.parametrize("seed", range(NUM_SEQUENCES))
def test_fused_transforms_of_jpegs_that_hardly_get_smaller_equal_separate_ones(seed: int) -> None:
    random = np.random.default_rng([2, seed])
    steps = naive.draw_steps(random, 23, 60)
    files = [by_pillow(noise(*size), subsampling=seed % 3) for size in _sizes(random, 4, 1, 45).tolist()]
    rng_keys = make_rng_keys(4, seed)
    expected = naive.transform_all(steps, [read_by_pillow(file) for file in files], rng_keys)
    for contents in (files, [tile_jpeg(file) for file in files]):
        pictures = [open_image(content) for content in contents]
        _assert_equal(apply_transform(Compose(steps), pictures, rng_keys), expected, steps)


SEQUENCES: dict[str, list[Geometry]] = {
    "train": [RandomResizedCrop(32), RandomHorizontalFlip()],
    "valid": [Resize(40), CenterCrop(32)],
    "valid, antialiased": [Resize(40, antialias=True), CenterCrop(32)],
    "two resizes": [Resize(50), Resize((31, 37))],
    "two crops and a resize": [CenterCrop((40, 30)), CenterCrop(25), Resize(24)],
    "padding, then a resize": [CenterCrop(80), Resize(40)],
    "padding by a window of a resize": [Resize(30), CenterCrop(64)],
    "padding twice": [CenterCrop(50), CenterCrop(90)],
    "padding, then a crop inside": [CenterCrop(90), CenterCrop(10)],
    "a crop of what is not there": [CenterCrop((90, 4)), CenterCrop((4, 90))],
    "flips before crops": [RandomHorizontalFlip(), CenterCrop((33, 20)), RandomHorizontalFlip(), CenterCrop((32, 9))],
    "a flip before an uneven crop": [RandomHorizontalFlip(1.0), CenterCrop(2)],
    "crops after a flipped resize": [Resize(39), RandomHorizontalFlip(), CenterCrop(24), CenterCrop(23)],
    "two random crops": [RandomResizedCrop(40), RandomHorizontalFlip(), RandomResizedCrop(23)],
    "nothing": [RandomHorizontalFlip(0.0)],
}


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("steps", SEQUENCES.values(), ids=SEQUENCES)
def test_typical_sequences_equal_separate_transforms(steps: list[Geometry], antialias: bool) -> None:
    images = [make_picture(*size) for size in [(45, 33), (44, 44), (37, 24), (1, 40), (40, 1), (25, 26)]]
    for step in steps:
        if isinstance(step, RandomResizedCrop | Resize):
            step.antialias = antialias
    rng_keys = make_rng_keys(len(images))
    _assert_equal(
        apply_transform(Compose(steps), images, rng_keys), naive.transform_all(steps, images, rng_keys), steps
    )
    pictures = [open_image(tile_jpeg(by_pillow(image))) for image in images]
    decoded = [read_by_pillow(by_pillow(image)) for image in images]
    _assert_equal(
        apply_transform(Compose(steps), pictures, rng_keys), naive.transform_all(steps, decoded, rng_keys), steps
    )


def _plan(box: Box, size: tuple[int, int], window: Box, flip: bool = False) -> CropPlan:
    return CropPlan(
        box=np.array([box]), size=np.array([size]), window=np.array([window]), flip=np.array([flip], dtype=np.bool_)
    )


def test_a_plan_of_whole_images_leaves_them_as_they_are() -> None:
    sizes = np.array([[3, 5], [1, 1], [7, 2]])
    images = [make_picture(*size) for size in sizes.tolist()]
    plan = CropPlan.whole(sizes)
    np.testing.assert_array_equal(plan.output_size, sizes)
    _assert_equal(render_chunk([DecodedPicture(image) for image in images], plan).images, images, plan)


def test_a_plan_for_no_images_gives_no_images() -> None:
    plan = CropPlan.whole(np.zeros((0, 2), np.int64))
    assert render_chunk([], plan).images == []
    assert plan.crop(np.zeros((0, 4), np.int64)).mirror(np.zeros(0, np.bool_)).output_size.shape == (0, 2)


def test_cropping_or_mirroring_returns_a_new_plan() -> None:
    plan = CropPlan.whole(np.array([[10, 20]]))
    plan.crop(np.array([[1, 2, 3, 4]]))
    plan.mirror(np.array([True]))
    plan.resize(np.array([[5, 5]]), "antialiased bilinear")
    assert (plan.window.tolist(), plan.flip.tolist(), plan.resampling) == ([[0, 0, 10, 20]], [False], "bilinear")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.resampling = "antialiased bilinear"  # type: ignore[misc]  # The plan must be frozen.


def test_a_crop_of_a_mirrored_image_comes_from_its_other_side() -> None:
    plan = CropPlan.whole(np.array([[10, 20], [10, 20]])).mirror(np.array([True, False]))
    assert plan.crop(np.array([[1, 2, 3, 4]] * 2)).window.tolist() == [[1, 14, 3, 4], [1, 2, 3, 4]]


def test_mirroring_twice_changes_nothing() -> None:
    plan = CropPlan.whole(np.array([[10, 20], [10, 20]])).mirror(np.array([True, False]))
    assert plan.mirror(np.array([True, True])).flip.tolist() == [False, True]


@pytest.mark.parametrize(
    ("plan", "can_resize"),
    [
        (_plan(Box(1, 2, 5, 6), (5, 6), Box(0, 0, 5, 6)), True),
        (_plan(Box(1, 2, 5, 6), (5, 6), Box(1, 1, 2, 2), flip=True), True),
        (_plan(Box(1, 2, 5, 6), (5, 7), Box(0, 0, 5, 7)), False),
        (_plan(Box(1, 2, 5, 6), (5, 6), Box(-1, 0, 5, 6)), False),
        (_plan(Box(1, 2, 5, 6), (5, 6), Box(0, -1, 5, 6)), False),
        (_plan(Box(1, 2, 5, 6), (5, 6), Box(1, 0, 5, 6)), False),
        (_plan(Box(1, 2, 5, 6), (5, 6), Box(0, 1, 5, 6)), False),
    ],
)
def test_a_plan_can_resize_unless_it_has_resized_or_padded(plan: CropPlan, can_resize: bool) -> None:
    assert plan.is_final.tolist() == [not can_resize]
    if can_resize:
        resized = plan.resize(np.array([[9, 8]]), "antialiased bicubic")
        top, left, height, width = plan.window[0].tolist()
        assert resized.box.tolist() == [[1 + top, 2 + left, height, width]]
        assert resized.output_size.tolist() == [[9, 8]]
        assert resized.flip.tolist() == plan.flip.tolist()
        assert resized.resampling == "antialiased bicubic"


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        ([CenterCrop(40), Resize(10)], [(50, 50), (30, 30)]),
        ([Resize(32), RandomResizedCrop(8, scale=(0.5, 1.0))], [(32, 60), (64, 32), (70, 70)]),
        ([CenterCrop(44), RandomHorizontalFlip(1.0), Resize(11)], [(50, 60), (43, 80), (44, 44)]),
        ([CenterCrop((90, 30)), CenterCrop((30, 90)), Resize(15)], [(90, 90), (20, 95), (95, 20)]),
    ],
    ids=str,
)
def test_an_image_does_not_depend_on_which_others_need_pixels_first(
    steps: list[Geometry], sizes: list[tuple[int, int]]
) -> None:
    """Padded or resized images are resized from full-size pixels; other JPEGs may be decoded at a smaller scale."""
    files = [tile_jpeg(by_pillow(make_picture(*size))) for size in sizes]
    rng_keys = make_rng_keys(len(files))
    together = apply_transform(Compose(steps), [open_image(file) for file in files], rng_keys)
    for row, file in enumerate(files):
        alone = apply_transform(Compose(steps), [open_image(file)], rng_keys[row : row + 1])
        np.testing.assert_array_equal(together[row], alone[0], err_msg=f"row {row}")


def test_an_error_names_the_row_even_if_only_some_images_need_pixels_first() -> None:
    good, bad = by_pillow(make_picture(60, 60)), by_pillow(make_picture(20, 20))
    pictures = [open_image(content) for content in (good, good, bad[:-40] + b"\xff\xd9", good)]
    with pytest.raises(DecodeError) as error_info:
        apply_transform(Compose([CenterCrop(40), Resize(20)]), pictures, make_rng_keys(4))
    assert error_info.value.row == 2
