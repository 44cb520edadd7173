"""Masks, boxes and points follow their image through crop plans: Pillow's NEAREST, and what is painted on the image."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from shardio.images import (
    CropPlan,
    DecodedPicture,
    PlanRow,
    edit_images,
    make_operations,
    render_chunk,
)
from shardio.images.kernel.compiled import operation_records as codes
from shardio.transforms.annotations import move_boxes, move_mask, move_points
from tests.images.test_editing import make_steps

AFFINE = Image.Transform.AFFINE


def make_plan(random: np.random.Generator, height: int, width: int) -> CropPlan:
    """Return a plan of one image: a box, resized, and a window that may reach beyond it, perhaps mirrored."""
    first = [np.sort(random.choice(side + 1, 2, replace=False)) for side in (height, width)]
    box = np.array([[first[0][0], first[1][0], np.ptp(first[0]), np.ptp(first[1])]])
    size = random.integers(1, 60, (1, 2)) if random.random() < 0.6 else box[:, 2:]
    window = np.concatenate([random.integers(-9, 20, (1, 2)), random.integers(1, 50, (1, 2))], axis=1)
    plan = CropPlan.whole(np.array([[height, width]])).crop(box).resize(size, "antialiased bilinear")
    return plan.crop(window).mirror(random.random(1) < 0.5)


def make_matrix(random: np.random.Generator) -> list[float]:
    turned = np.eye(2) + random.uniform(-0.5, 0.5, (2, 2))
    shift = random.uniform(-9, 9, 2)
    return [*turned[0].tolist(), float(shift[0]), *turned[1].tolist(), float(shift[1])]


def edit_affinely(plan: CropPlan, matrix: list[float]) -> CropPlan:
    return plan.edit(make_operations(1, codes.AFFINE, *matrix, 0, 0, 0))


def move_by_pillow(mask: NDArray[Any], plan: CropPlan, fill: int) -> Image.Image:
    (top, left, height, width), (new_height, new_width) = plan.box[0].tolist(), plan.size[0].tolist()
    image = Image.fromarray(mask).crop((left, top, left + width, top + height))
    resized = image.resize((new_width, new_height), Image.Resampling.NEAREST)
    window_top, window_left, window_height, window_width = plan.window[0].tolist()
    shown = Image.new(image.mode, (window_width, window_height), fill)
    shown.paste(resized, (-window_left, -window_top))
    return shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if plan.flip[0] else shown


def visible_box(is_painted: NDArray[np.bool_]) -> list[int]:
    rows, columns = np.flatnonzero(is_painted.any(axis=1)), np.flatnonzero(is_painted.any(axis=0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def test_everything_in_a_plan_is_known_to_what_follows_it() -> None:
    """Whoever adds an attribute decides what it does to masks, boxes and points: see _sides_of."""
    known = {"box", "size", "window", "flip", "upside_down", "operations"}
    assert {field.name for field in dataclasses.fields(CropPlan)} == {*known, "resampling"}


def test_other_operations_leave_pixels_where_they_are() -> None:
    """A square on a plain image stays there, up to blurring; AFFINE moves it."""
    random = np.random.default_rng(7)
    image = np.full((60, 60, 3), 90, np.uint8)
    image[25:30, 40:46] = 200
    is_far = np.ones((60, 60), np.bool_)
    is_far[20:35, 35:51] = False
    steps = make_steps(random)
    assert {code for code, _, _ in steps.values()} >= set(codes.MOVING)
    del steps["erase"], steps["vertical flip"]  # One paints what all fields show; the other is part of the plan.
    for name, (code, numbers, _) in steps.items():
        edited = image.copy()
        edit_images([edited], make_operations(1, code, *numbers))
        assert code in codes.MOVING or (edited[is_far] == edited[0, 0]).all(), name
    shifted = image.copy()
    edit_images([shifted], make_operations(1, codes.AFFINE, 1, 0, 20, 0, 1, 0, 0, 0, 0))
    assert not (shifted[is_far] == shifted[0, 0]).all()


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "uint16", "bool", "int64"])
def test_masks_are_moved_and_turned_as_by_pillows_nearest(dtype: str) -> None:
    """Pillow has no mode for some of these types. Their values fit in 32 bits, which it has."""
    random = np.random.default_rng(0)
    for number in range(120):
        height, width = random.integers(1, 90, 2).tolist()
        mask = random.integers(0, 256 if dtype == "uint8" else 60_000, (height, width)).astype(dtype)
        form = mask if dtype in ("uint8", "int32", "float32") else mask.astype(np.int32)
        if number % 3 or dtype == "bool":
            plan, fill = make_plan(random, height, width), int(random.integers(2))
            expected = move_by_pillow(form, plan, fill)
        else:
            matrix, fill = make_matrix(random), 255
            plan = edit_affinely(CropPlan.whole(np.array([[height, width]])), matrix)
            expected = Image.fromarray(form).transform((width, height), AFFINE, matrix, fillcolor=255)
        moved = move_mask(mask, PlanRow(plan, 0), fill)
        assert moved.dtype == mask.dtype
        np.testing.assert_array_equal(moved, np.asarray(expected))


def test_channels_of_a_mask_move_together() -> None:
    random = np.random.default_rng(2)
    mask = random.integers(0, 60_000, (40, 50, 4)).astype(np.uint16)
    plan = edit_affinely(make_plan(random, 40, 50), make_matrix(random))
    moved = move_mask(mask, PlanRow(plan, 0), 7)
    for channel in range(4):
        np.testing.assert_array_equal(moved[..., channel], move_mask(mask[..., channel], PlanRow(plan, 0), 7))


def test_an_image_that_no_other_pixels_were_mixed_into_shows_its_mask() -> None:
    """Pixels of a resized image that are pure black or white were mixed of pixels that are all alike."""
    random = np.random.default_rng(3)
    num_compared = 0
    for _ in range(100):
        height, width = random.integers(20, 90, 2).tolist()
        blocks = random.integers(0, 2, (1 + height // 9, 1 + width // 9)).astype(np.uint8)
        mask = np.kron(blocks, np.ones((9, 9), np.uint8))[:height, :width]
        plan = make_plan(random, height, width)
        if random.random() < 0.5:
            plan = edit_affinely(plan, make_matrix(random))
        image = np.repeat(255 * mask[..., np.newaxis], 3, axis=2)
        (shown,) = render_chunk([DecodedPicture(image)], plan).images
        moved = move_mask(mask, PlanRow(plan, 0), 0)
        is_pure = np.isin(shown[..., 0], (0, 255))
        num_compared += int(moved[is_pure].sum())
        np.testing.assert_array_equal(moved[is_pure], shown[is_pure, 0] // 255)
    assert num_compared > 3_000


def test_boxes_bound_what_was_painted() -> None:
    random = np.random.default_rng(4)
    num_visible = 0
    for number in range(300):
        height, width = random.integers(60, 120, 2).tolist()
        left, top = int(random.integers(0, width - 30)), int(random.integers(0, height - 30))
        right, bottom = left + int(random.integers(20, width - left)), top + int(random.integers(20, height - top))
        mask = np.zeros((height, width), np.uint8)
        mask[top:bottom, left:right] = 1
        plan = make_plan(random, height, width)
        is_turned = number % 2 == 1
        if is_turned:
            plan = edit_affinely(plan, make_matrix(random))
        step = PlanRow(plan, 0)
        ((*corner, end_x, end_y),) = move_boxes(np.array([[left, top, right, bottom]], np.float64), step).tolist()
        moved = move_mask(mask, step, 0)
        new_height, new_width = moved.shape
        assert 0 <= corner[0] <= end_x <= new_width
        assert 0 <= corner[1] <= end_y <= new_height
        if not moved.any():
            continue
        num_visible += 1
        found = visible_box(moved == 1)
        # A turned box is the smallest upright one around all four corners of what a plan shows.
        assert (np.array(found[:2]) >= np.floor(np.array(corner) - 1)).all()
        assert (np.array(found[2:]) <= np.ceil(np.array([end_x, end_y]) + 1)).all()
        if not is_turned:
            np.testing.assert_allclose(found, [*corner, end_x, end_y], atol=1)
    assert num_visible > 50


def test_points_stay_on_the_dots_that_they_name() -> None:
    random, whole = np.random.default_rng(6), CropPlan.whole(np.array([[80, 100]]))
    num_visible = 0
    for _ in range(200):
        mask = np.zeros((80, 100), np.uint8)
        x, y = int(random.integers(4, 96)), int(random.integers(4, 76))
        mask[y - 4 : y + 5, x - 4 : x + 5] = 1
        box = np.array([[*random.integers(0, 20, 2), *random.integers(40, 61, 2)]])
        plan = whole.crop(box).resize(random.integers(30, 90, (1, 2))).mirror(random.random(1) < 0.5)
        ((moved_x, moved_y),) = move_points(np.array([[x, y]], np.float64), PlanRow(plan, 0)).tolist()
        moved = move_mask(mask, PlanRow(plan, 0), 0)
        is_visible = 0 <= moved_y <= len(moved) - 1 and 0 <= moved_x <= moved.shape[1] - 1
        num_visible += is_visible
        assert not is_visible or moved[round(moved_y), round(moved_x)] == 1
    assert num_visible > 50


def test_what_the_result_does_not_show_has_no_area() -> None:
    step = PlanRow(CropPlan.whole(np.array([[40, 40]])).crop(np.array([[10, 10, 20, 20]])), 0)
    boxes = np.array([[0, 0, 5, 5], [35, 0, 40, 40], [0, 0, 40, 40], [12, 30, 15, 38]], np.float64)
    assert move_boxes(boxes, step).tolist() == [[0, 0, 0, 0], [20, 0, 20, 20], [0, 0, 20, 20], [2, 20, 5, 20]]
    assert move_points(boxes[:, :2], step).tolist() == [[-10, -10], [25, -10], [-10, -10], [2, 20]]
    padded = PlanRow(CropPlan.whole(np.array([[10, 20]])).crop(np.array([[-5, -5, 20, 30]])), 0)
    assert move_boxes(np.array([[-3.0, -3.0, 40.0, 40.0]]), padded).tolist() == [[5, 5, 25, 15]], "not into the black"
    turned = PlanRow(edit_affinely(make_plan(np.random.default_rng(5), 40, 50), [1, 0.1, 0, 0, 1, 0]), 0)
    assert move_boxes(np.zeros((0, 4)), turned).shape == (0, 4)
    assert move_points(np.zeros((0, 2)), turned).shape == (0, 2)
