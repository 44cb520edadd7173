"""Crop plans say what their transforms, done one by one to whole arrays, would do."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shardio.images import CropPlan, DecodedPicture, DecodeError, decode_all, open_image
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
from tests.transforms.pictures import make_keys

NUM_SEQUENCES = 120


def _assert_equal(results: list[Any], expected: list[Array], name: object) -> None:
    for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        np.testing.assert_array_equal(result, wanted, err_msg=f"image {number} of {name}")


def _sizes(random: np.random.Generator, number: int, smallest: int, largest: int) -> NDArray[np.int64]:
    return random.integers(smallest, largest + 1, (number, 2))


@pytest.mark.parametrize("seed", range(NUM_SEQUENCES))
def test_fused_transforms_of_arrays_and_pngs_are_those_done_one_by_one(seed: int) -> None:
    """Of small images: of larger ones a mirrored image resized by OpenCV differs by 1 here and there."""
    random = np.random.default_rng([1, seed])
    steps = naive.draw_steps(random, 1, 60)
    images = [noise(height, width) for height, width in _sizes(random, 4, 1, 70).tolist()]
    keys = make_keys(4, seed)
    expected = naive.transform_all(steps, images, keys)
    _assert_equal(apply_transform(Compose(steps), images, keys), expected, steps)
    pictures = [open_image(save(image, "PNG")) for image in images]
    _assert_equal(apply_transform(Compose(steps), pictures, keys), expected, steps)


@pytest.mark.parametrize("seed", range(NUM_SEQUENCES))
def test_fused_transforms_of_jpegs_that_hardly_get_smaller_are_those_done_one_by_one(seed: int) -> None:
    random = np.random.default_rng([2, seed])
    steps = naive.draw_steps(random, 23, 60)
    files = [by_pillow(noise(*size), subsampling=seed % 3) for size in _sizes(random, 4, 1, 45).tolist()]
    keys = make_keys(4, seed)
    expected = naive.transform_all(steps, [read_by_pillow(file) for file in files], keys)
    for contents in (files, [tile_jpeg(file) for file in files]):
        pictures = [open_image(content) for content in contents]
        _assert_equal(apply_transform(Compose(steps), pictures, keys), expected, steps)


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
def test_known_sequences_are_those_done_one_by_one(steps: list[Geometry], antialias: bool) -> None:
    images = [make_picture(*size) for size in [(45, 33), (44, 44), (37, 24), (1, 40), (40, 1), (25, 26)]]
    for step in steps:
        if isinstance(step, RandomResizedCrop | Resize):
            step.antialias = antialias
    keys = make_keys(len(images))
    _assert_equal(apply_transform(Compose(steps), images, keys), naive.transform_all(steps, images, keys), steps)
    pictures = [open_image(tile_jpeg(by_pillow(image))) for image in images]
    decoded = [read_by_pillow(by_pillow(image)) for image in images]
    _assert_equal(apply_transform(Compose(steps), pictures, keys), naive.transform_all(steps, decoded, keys), steps)


def _plan(box: Box, size: tuple[int, int], window: Box, flip: bool = False) -> CropPlan:
    return CropPlan(
        box=np.array([box]), size=np.array([size]), window=np.array([window]), flip=np.array([flip], dtype=np.bool_)
    )


def test_plans_of_whole_images_leave_them_as_they_are() -> None:
    sizes = np.array([[3, 5], [1, 1], [7, 2]])
    images = [make_picture(*size) for size in sizes.tolist()]
    plans = CropPlan.whole(sizes)
    np.testing.assert_array_equal(plans.output_size, sizes)
    _assert_equal(decode_all([DecodedPicture(image) for image in images], plans), images, plans)


def test_a_plan_for_no_images_gives_none() -> None:
    plans = CropPlan.whole(np.zeros((0, 2), np.int64))
    assert decode_all([], plans) == []
    assert plans.crop(np.zeros((0, 4), np.int64)).mirror(np.zeros(0, np.bool_)).output_size.shape == (0, 2)


def test_cropping_or_mirroring_gives_new_plans_and_leaves_the_old() -> None:
    plans = CropPlan.whole(np.array([[10, 20]]))
    plans.crop(np.array([[1, 2, 3, 4]]))
    plans.mirror(np.array([True]))
    plans.resize(np.array([[5, 5]]), antialias=True)
    assert (plans.window.tolist(), plans.flip.tolist(), plans.antialias) == ([[0, 0, 10, 20]], [False], False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plans.antialias = True  # type: ignore[misc]  # That is what must not work.


def test_a_crop_of_a_mirrored_image_is_taken_from_its_other_side() -> None:
    plans = CropPlan.whole(np.array([[10, 20], [10, 20]])).mirror(np.array([True, False]))
    assert plans.crop(np.array([[1, 2, 3, 4]] * 2)).window.tolist() == [[1, 14, 3, 4], [1, 2, 3, 4]]


def test_mirroring_twice_is_mirroring_not_at_all() -> None:
    plans = CropPlan.whole(np.array([[10, 20], [10, 20]])).mirror(np.array([True, False]))
    assert plans.mirror(np.array([True, True])).flip.tolist() == [False, True]


@pytest.mark.parametrize(
    ("plans", "can_resize"),
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
def test_resizing_goes_on_unless_pixels_are_resized_or_padded(plans: CropPlan, can_resize: bool) -> None:
    assert plans.is_final.tolist() == [not can_resize]
    if can_resize:
        resized = plans.resize(np.array([[9, 8]]), antialias=True)
        top, left, height, width = plans.window[0].tolist()
        assert resized.box.tolist() == [[1 + top, 2 + left, height, width]]
        assert resized.output_size.tolist() == [[9, 8]]
        assert resized.flip.tolist() == plans.flip.tolist()
        assert resized.antialias


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
    """Padded or resized pixels are resized from whole ones, where JPEGs may be decoded at a smaller scale."""
    files = [tile_jpeg(by_pillow(make_picture(*size))) for size in sizes]
    keys = make_keys(len(files))
    together = apply_transform(Compose(steps), [open_image(file) for file in files], keys)
    for number, file in enumerate(files):
        alone = apply_transform(Compose(steps), [open_image(file)], keys[number : number + 1])
        np.testing.assert_array_equal(together[number], alone[0], err_msg=f"image {number}")


def test_an_error_names_the_image_also_where_only_some_need_pixels_first() -> None:
    good, bad = by_pillow(make_picture(60, 60)), by_pillow(make_picture(20, 20))
    pictures = [open_image(content) for content in (good, good, bad[:-40] + b"\xff\xd9", good)]
    with pytest.raises(DecodeError) as error_info:
        apply_transform(Compose([CenterCrop(40), Resize(20)]), pictures, make_keys(4))
    assert error_info.value.row == 2
