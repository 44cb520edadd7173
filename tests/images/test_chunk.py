"""Chunks: pictures and a crop plan become pixels in the rows of a batch.

The pixels are those of the plan's transforms, applied one after another to whole arrays.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest

from shardio.images import CropPlan, DecodedPicture, DecodeError, Picture, Pixels, Resampling, open_image, render_chunk
from shardio.images.jpeg import Box
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
from tests.images.crop_laws import draw_plan, part
from tests.images.jpeg_files import SAMPLINGS, by_pillow, make_jpeg, noise
from tests.images.pictures import Array, make_picture, read_by_pillow, save
from tests.transforms.inputs import make_rng_keys

SIZE = (99, 132)


def _plan(
    boxes: list[Box], sizes: list[tuple[int, int]], *, windows: Any = (), flips: Any = (), resampling: Any = "bilinear"
) -> CropPlan:
    return CropPlan(
        box=np.array(boxes, dtype=np.int64),
        size=np.array(sizes, dtype=np.int64),
        window=np.array(windows or [Box(0, 0, *size) for size in sizes], dtype=np.int64),
        flip=np.array(flips or [False] * len(boxes), dtype=np.bool_),
        resampling=resampling,
    )


@pytest.mark.parametrize("resampling", get_args(Resampling))
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_random_plans_give_the_pixels_of_cropped_resized_and_cropped_arrays(
    sampling: str, resampling: Resampling
) -> None:
    random = np.random.default_rng([len(sampling), get_args(Resampling).index(resampling)])
    plan = draw_plan([SIZE] * 40, (45, 70), resampling, random)
    jpeg = make_jpeg("", noise(*SIZE), factors=SAMPLINGS[sampling], quality=80).content
    for kind, content in {"jpeg": jpeg, "tiled": tile_jpeg(jpeg), "png": save(noise(*SIZE), "PNG")}.items():
        rendered, whole = render_chunk([open_image(content)] * 40, plan), read_by_pillow(content)
        assert set(rendered.decoder_names) == {"pillow" if kind == "png" else "kernel"}
        for row, result in enumerate(rendered.images):
            np.testing.assert_array_equal(result, naive.render(whole, plan, row), f"{kind}: row {row} of {plan}")


@pytest.mark.parametrize("has_kernel", [True, False])
def test_large_boxes_are_averaged_if_both_sides_are_at_least_halved_and_else_interpolated(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr("shardio.images.rendering.find_kernel", lambda: None)
    jpeg, box = by_pillow(make_picture(1050, 1110)), Box(40, 3, 1000, 1100)
    before = part(read_by_pillow(jpeg), box).copy()
    halved, others = [(500, 550), (224, 224), (125, 137), (70, 70), (9, 40)], [(501, 550), (500, 551)]
    expected = [naive.resize(before, *size, resampling="antialiased bilinear") for size in halved]
    expected = 2 * (expected + [naive.resize_bilinear(before, *size) for size in others])
    expected[7:] = [pixels[:, ::-1] for pixels in expected[7:]]
    plan = _plan([box] * 14, 2 * (halved + others), flips=[False] * 7 + [True] * 7)
    for content in (jpeg, tile_jpeg(jpeg)):
        rendered = render_chunk([open_image(content)] * 14, plan)
        assert set(rendered.decoder_names) == {"kernel" if has_kernel else "libjpeg"}
        assert_equal(rendered.images, expected, plan)


class _SpyPicture(Picture):
    """A picture that records which parts are read."""

    def __init__(self, content: bytes) -> None:
        self._picture = open_image(content)
        self.size, self.decoder_name = self._picture.size, self._picture.decoder_name
        self.parts: list[Box] = []

    def part(self, box: Box) -> Callable[[], Pixels]:
        self.parts.append(box)
        return self._picture.part(box)


@pytest.mark.parametrize("side", [80, 40, 130])
def test_only_what_a_window_needs_is_read(side: int) -> None:
    for content in (save(noise(*SIZE), "PNG"), by_pillow(noise(*SIZE))):
        picture = _SpyPicture(content)
        render_chunk([picture], _plan([Box(5, 5, 80, 80)], [(side, side)], windows=[Box(10, 20, 3, 4)]))
        (read,) = picture.parts
        assert read.height <= 3 * 80 / side + 5
        assert read.width <= 4 * 80 / side + 5


def test_the_error_of_a_damaged_image_names_its_row_in_the_chunk() -> None:
    good = by_pillow(make_picture(40, 40))
    for row in range(4):
        contents = [good] * 4
        contents[row] = good[: len(good) * 2 // 3] + b"\xff\xd9"
        with pytest.raises(DecodeError, match=r".+") as error_info:
            render_chunk([open_image(content) for content in contents], CropPlan.whole(np.array([[40, 40]] * 4)))
        assert error_info.value.row == row
        assert isinstance(error_info.value, ValueError)
    error = pickle.loads(pickle.dumps(DecodeError(3, "the data ends early")))
    assert isinstance(error, DecodeError)
    assert (error.row, str(error)) == (3, "the data ends early")


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("window", [Box(0, 0, 20, 30), Box(-5, -6, 20, 30), Box(3, 4, 20, 30), Box(30, 40, 20, 30)])
def test_only_the_given_rows_of_a_batch_are_written(window: Box, flip: bool) -> None:
    batch = np.full((6, 50, 70, 3), 77, np.uint8)
    rows = batch[:, 5:25, 10:40]
    pictures: list[Picture] = [open_image(by_pillow(noise(*SIZE))) for _ in range(2)]
    boxes = [Box(1, 2, 25, 36)] * 2
    plan = _plan(boxes, [(22, 33)] * 2, windows=[window] * 2, flips=[flip, not flip])
    render_chunk(pictures, plan, [rows[4], rows[1]])
    np.testing.assert_array_equal(rows[[4, 1]], render_chunk(pictures, plan).images)
    rows[[4, 1]] = 77
    assert (batch == 77).all()


def test_new_rows_of_one_size_share_an_array_and_others_do_not() -> None:
    pictures = [open_image(by_pillow(noise(*SIZE)))] * 2
    same = render_chunk(pictures, _plan([Box(0, 0, 9, 9)] * 2, [(5, 5)] * 2)).images
    assert same[0].base is same[1].base is not None
    other = render_chunk(pictures, _plan([Box(0, 0, 9, 9)] * 2, [(5, 5), (6, 5)])).images
    assert [pixels.shape for pixels in other] == [(5, 5, 3), (6, 5, 3)]


def test_a_resize_to_a_huge_image_is_refused() -> None:
    """A line of 20,000 pixels, resized so that its shorter side is 256, would have 5,120,000 columns."""
    line = np.zeros((1, 20_000, 3), np.uint8)
    with pytest.raises(DecodeError, match="20000×1 pixels cannot be resized to 5120000×256"):
        Compose([Resize(256), CenterCrop(224)])(line)


# Sequences of transforms.


def assert_equal(results: list[Any], expected: list[Array], name: object) -> None:
    for row, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        np.testing.assert_array_equal(result, wanted, err_msg=f"row {row} of {name}")


@pytest.mark.parametrize("seed", range(20))
def test_fused_transforms_equal_separate_ones(seed: int) -> None:
    """The images are small: in larger images, OpenCV's resize of a mirrored image differs by 1 in places."""
    random, rng_keys = np.random.default_rng([1, seed]), make_rng_keys(4, seed)
    steps = naive.draw_steps(random, 1, 60)
    images = [noise(*size) for size in random.integers(1, 71, (4, 2)).tolist()]
    expected = naive.transform_all(steps, images, rng_keys)
    assert_equal(apply_transform(Compose(steps), images, rng_keys), expected, steps)
    pictures = [open_image(save(image, "PNG")) for image in images]
    assert_equal(apply_transform(Compose(steps), pictures, rng_keys), expected, steps)
    steps = naive.draw_steps(random, 23, 60)
    files = [by_pillow(noise(*size), subsampling=seed % 3) for size in random.integers(1, 46, (4, 2)).tolist()]
    expected = naive.transform_all(steps, [read_by_pillow(file) for file in files], rng_keys)
    for contents in (files, [tile_jpeg(file) for file in files]):
        assert_equal(
            apply_transform(Compose(steps), [open_image(each) for each in contents], rng_keys), expected, steps
        )


def test_plans_of_whole_images_and_of_none() -> None:
    sizes = np.array([[3, 5], [1, 1], [7, 2]])
    images, plan = [make_picture(*size) for size in sizes.tolist()], CropPlan.whole(sizes)
    np.testing.assert_array_equal(plan.output_size, sizes)
    assert_equal(render_chunk([DecodedPicture(image) for image in images], plan).images, images, plan)
    none = CropPlan.whole(np.zeros((0, 2), np.int64))
    assert render_chunk([], none).images == []
    assert none.crop(np.zeros((0, 4), np.int64)).mirror(np.zeros(0, np.bool_)).output_size.shape == (0, 2)


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
def test_images_do_not_depend_on_which_others_need_pixels(steps: list[Geometry], sizes: list[tuple[int, int]]) -> None:
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
