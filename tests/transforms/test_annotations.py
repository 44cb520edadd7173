"""Boxes, points and masks move with their image as in torchvision, and a Compose with fields rejects invalid input."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from shardio import transforms as tr
from shardio.images import CropPlan, DecodedPicture, Picture, PlanRow, edit_images, make_operations, render_chunk
from shardio.kernel import operations as codes
from shardio.transforms.annotations import check_field_kinds, move_boxes, move_mask, move_points
from shardio.transforms.warps import make_affine_matrix
from tests.images.crop_laws import draw_plan
from tests.images.pictures import make_picture
from tests.images.test_editing import make_steps
from tests.raising import assert_raises
from tests.transforms.by_torchvision import functional, tv_tensors, v2
from tests.transforms.inputs import make_rng_keys

HEIGHT, WIDTH = 60, 90
WHOLE = CropPlan.whole(np.array([[HEIGHT, WIDTH]]))
FIELDS = {"image": "image", "boxes": "boxes", "points": "keypoints", "labels": "labels", "mask": "mask"}


FLIP, TURNING = tr.RandomVerticalFlip(), tr.RandomAffine(45, (0.1, 0.1), (0.9, 1.2), 4, interpolation="bilinear")


def make_boxes(num_boxes: int, dtype: Any = np.float64) -> NDArray[Any]:
    random = np.random.default_rng(num_boxes)
    sides = np.array([WIDTH, HEIGHT])
    corners = np.sort(random.uniform(0, 1, (num_boxes, 2, 2)), axis=1) * sides
    boxes: NDArray[Any] = corners.reshape(-1, 4).astype(dtype)
    return boxes


def follow(values: dict[str, Any], plan: CropPlan, **kinds: Any) -> dict[str, Any]:
    checked = check_field_kinds({"image": "image", **FIELDS, **kinds})
    return tr.move_annotations(checked, values, (HEIGHT, WIDTH), [PlanRow(plan, 0)])


def draw_one(random: np.random.Generator, height: int, width: int) -> CropPlan:
    window = (int(random.integers(1, 50)), int(random.integers(1, 50)))
    return draw_plan([(height, width)], window, "antialiased bilinear", random)


def turn(plan: CropPlan, matrix: Sequence[float]) -> CropPlan:
    return plan.edit(make_operations(1, codes.AFFINE, *matrix, 0, 0, 0))


def wrap(values: NDArray[Any], box_format: str | None = None) -> Any:
    tensor = torch.from_numpy(values)
    if box_format is None:
        return tv_tensors.KeyPoints(tensor, canvas_size=(HEIGHT, WIDTH))
    return tv_tensors.BoundingBoxes(tensor, format=box_format.upper(), canvas_size=(HEIGHT, WIDTH))


GEOMETRIES: dict[str, tuple[CropPlan, Any]] = {
    "crop": (WHOLE.crop(np.array([[10, 20, 30, 40]])), lambda x: functional.crop(x, 10, 20, 30, 40)),
    "resized crop": (
        WHOLE.crop(np.array([[10, 20, 30, 41]])).resize(np.array([[57, 33]])),
        lambda x: functional.resized_crop(x, 10, 20, 30, 41, [57, 33]),
    ),
    "resize": (WHOLE.resize(np.array([[25, 101]])), lambda x: functional.resize(x, [25, 101])),
    "mirror": (WHOLE.mirror(np.ones(1, np.bool_)), functional.horizontal_flip),
    "padding": (WHOLE.crop(np.array([[-7, -11, 70, 120]])), lambda x: functional.pad(x, [11, 7, 19, 3])),
    "all": (
        WHOLE.crop(np.array([[5, 5, 50, 70]]))
        .resize(np.array([[40, 64]]))
        .mirror(np.ones(1, np.bool_))
        .crop(np.array([[8, 16, 24, 40]])),
        lambda x: functional.crop(
            functional.horizontal_flip(functional.resized_crop(x, 5, 5, 50, 70, [40, 64])), 8, 16, 24, 40
        ),
    ),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_boxes_and_points_are_torchvisions(name: str) -> None:
    plan, by_torchvision = GEOMETRIES[name]
    about: dict[str, Any] = {"rtol": 1e-6, "atol": 2e-5}  # torchvision rounds ratios to 32 bits.
    for dtype in (np.float32, np.float64):
        boxes, points = make_boxes(30, dtype), make_boxes(30, dtype)[:, :2]
        moved = follow({"boxes": boxes, "points": points}, plan)
        for own, expected in ((moved["boxes"], wrap(boxes, "xyxy")), (moved["points"], wrap(points))):
            assert own.dtype == dtype
            np.testing.assert_allclose(own, by_torchvision(expected).numpy(), **about)
    formats: list[Any] = ["xywh", "cxcywh"]
    for box_format in formats:
        given = functional.convert_bounding_box_format(wrap(make_boxes(30), "xyxy"), new_format=box_format.upper())
        own = follow({"boxes": given.numpy()}, plan, boxes=tr.BoundingBoxes(format=box_format))["boxes"]
        np.testing.assert_allclose(own, by_torchvision(given).numpy(), **about)


def test_turned_boxes_and_points_are_torchvisions() -> None:
    angle, translate, scale, shear = 25.0, [6, -4], 1.2, [10.0, -5.0]
    matrix = make_affine_matrix((WIDTH / 2, HEIGHT / 2), angle, (6, -4), scale, (10.0, -5.0))
    plan = turn(WHOLE, matrix)
    boxes, points = make_boxes(30), make_boxes(30)[:, :2]
    moved = follow({"boxes": boxes, "points": points}, plan)
    for own, given in ((moved["boxes"], wrap(boxes, "xyxy")), (moved["points"], wrap(points))):
        expected = functional.affine(given, angle=angle, translate=translate, scale=scale, shear=shear)
        np.testing.assert_allclose(own, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("settings", [{"min_size": 5, "min_area": 1}, {"min_size": 1, "min_area": 60}], ids=str)
def test_small_boxes_are_dropped_as_by_torchvision_with_what_belongs_to_them(settings: dict[str, Any]) -> None:
    plan, by_torchvision = GEOMETRIES["all"]
    boxes, labels = make_boxes(60), np.arange(60)
    sample = {"boxes": by_torchvision(wrap(boxes, "xyxy")), "labels": torch.from_numpy(labels)}
    expected = v2.SanitizeBoundingBoxes(**settings)(sample)
    parts = np.stack([labels, labels, np.zeros(60)], axis=1)[:, np.newaxis]  # Each box has one point.
    kinds = {"boxes": tr.BoundingBoxes(**settings), "points": tr.KeyPoints(boxes="boxes")}
    moved = follow({"labels": labels.tolist(), "boxes": boxes, "points": parts}, plan, **kinds)
    np.testing.assert_allclose(moved["boxes"], expected["boxes"].numpy(), rtol=1e-6, atol=2e-5)
    np.testing.assert_array_equal(moved["labels"], expected["labels"].numpy())
    assert 5 < len(moved["boxes"]) < 50
    kept = follow({"points": parts}, plan)["points"][moved["labels"]]
    np.testing.assert_array_equal(moved["points"], kept)


def test_all_boxes_are_kept_by_default_lists_become_32_bits_and_other_columns_of_points_stay() -> None:
    moved = follow({"boxes": make_boxes(60), "labels": list(range(60))}, GEOMETRIES["all"][0])
    assert (moved["boxes"].shape, moved["labels"].tolist()) == ((60, 4), list(range(60)))
    assert (moved["boxes"][:, 2] == moved["boxes"][:, 0]).any(), "some boxes are not visible"
    lists = {"boxes": [[1, 2, 3, 4]], "points": [[[80, 7, 2], [3, 4, 0]]], "labels": [5]}
    moved = follow(lists, GEOMETRIES["mirror"][0])
    assert all(isinstance(value, tr.Ragged) for value in moved.values())
    assert [value.dtype for value in moved.values()] == [np.float32, np.float32, np.int64]
    assert [value.tolist() for value in moved.values()] == [[[87, 2, 89, 4]], [[[9, 7, 2], [86, 4, 0]]], [5]]


def test_samples_may_have_no_boxes_and_lack_values() -> None:
    moved = follow({"boxes": [], "points": [], "labels": [], "mask": None}, GEOMETRIES["all"][0])
    assert [getattr(value, "shape", None) for value in moved.values()] == [(0, 4), (0, 2), (0,), None]
    assert follow({"boxes": None, "labels": [3]}, WHOLE)["labels"].tolist() == [3]


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"boxes": [[1, 2, 3]]}, {}, "must be boxes [k, 4], got int64 [1, 3]"),
    ({"boxes": [[1, 2, 3, 4], [1]]}, {}, "must be boxes"),
    ({"points": [1, 2]}, {}, "must be points [..., 2 or more], got int64 [2]"),
    ({"labels": ["cat"]}, {}, "must be numbers [k, ...], got list of <U3"),
    ({"labels": [1, 2], "boxes": [[1, 2, 3, 4]]}, {}, "must have 1 row, one for each of the boxes 'boxes', got [2]"),
    ({"mask": np.zeros((9, 8), np.uint8)}, {}, "is a mask of 8×9 pixels, but the image has 90×60"),
    ({"mask": np.zeros((HEIGHT, WIDTH), np.uint8)}, {"mask": tr.Mask(fill=-1)}, "cannot hold fill=-1"),
]


@pytest.mark.parametrize(("values", "kinds", "message"), BAD)
def test_a_value_of_another_form_is_an_error(values: dict[str, Any], kinds: dict[str, Any], message: str) -> None:
    with pytest.raises(tr.AnnotationError, match=re.escape(message)) as caught:
        follow(values, WHOLE, **kinds)
    assert caught.value.name == next(iter(values))


@pytest.mark.parametrize(
    "steps",
    [
        [tr.RandomResizedCrop(40), tr.RandomHorizontalFlip()],
        [TURNING, tr.RandomResizedCrop(30), tr.RandomHorizontalFlip()],
        [FLIP, tr.RandomPerspective(0.5, 1), tr.RandomCrop(50, 4), tr.RandomRotation(30), FLIP],
        [tr.RandomApply([tr.RandomRotation(45), TURNING], 0.5), tr.RandomResizedCrop(30), tr.RandomErasing(1)],
        [tr.CenterCrop(50), tr.CenterCrop(70), tr.RandomHorizontalFlip(), TURNING, tr.Resize((30, 40))],
        [tr.Resize(70), tr.RandomResizedCrop(40), tr.CenterCrop((50, 30)), tr.RandomHorizontalFlip()],
    ],
    ids=str,
)
def test_everything_follows_images_that_are_rendered_between_steps(steps: list[Any]) -> None:
    images, masks = [], []
    for seed, size in enumerate([(HEIGHT, WIDTH), (55, 61), (90, 49), (48, 120)]):
        mask = np.zeros(size, np.uint8)
        mask[15:40, 12:44] = 1
        images.append(np.where(mask[..., np.newaxis] == 1, 255, make_picture(*size, seed) // 2))
        masks.append(mask)
    pictures: list[Picture] = [DecodedPicture(image.astype(np.uint8)) for image in images]
    planned, plan = tr.plan_transform(tr.Compose(steps), pictures, make_rng_keys(4))
    assert plan is not None
    rendered, num_square = render_chunk(planned, plan).images, 0
    again = render_chunk(tr.render_like(list(pictures), planned), plan).images
    for row, (image, other) in enumerate(zip(rendered, again, strict=True)):
        np.testing.assert_array_equal(image, other)
        values = {"mask": masks[row], "boxes": [[12, 15, 44, 40]], "points": [[28, 27]]}
        history = (*planned[row].history, PlanRow(plan, row))
        moved = tr.move_annotations(check_field_kinds(FIELDS), values, masks[row].shape, history)
        assert moved["mask"].shape == image.shape[:2]
        is_square = (image == 255).all(axis=2)
        num_square += int(is_square.sum())
        assert (moved["mask"][is_square] == 1).all()
        assert (image[moved["mask"] == 0] < 255).any(axis=1).all()
        (x, y), (left, top, right, bottom) = moved["points"][0], moved["boxes"][0]
        if left < x < right - 1 and top < y < bottom - 1:
            assert moved["mask"][round(float(y)), round(float(x))] == 1
        found = np.argwhere(moved["mask"])
        assert (found >= [top - 1, left - 1]).all()
        assert (found <= [bottom + 1, right + 1]).all()
    assert num_square > 400


def test_what_fields_may_be() -> None:
    fields: dict[str, Any] = {"image": "image", "b": "boxes", "l": "labels", "m": tr.Mask(fill=255)}
    transform = tr.Compose([tr.CenterCrop(3)], fields=fields)
    assert tr.field_kinds_of(transform) == {**fields, "b": tr.BoundingBoxes(), "l": tr.Labels(boxes="b")}
    assert tr.is_builtin(transform)
    assert repr(pickle.loads(pickle.dumps(transform))) == repr(transform)
    assert tr.field_kinds_of(tr.CenterCrop(3)) == tr.field_kinds_of(tr.Compose([tr.CenterCrop(3)])) == {}
    bad: list[tuple[Any, type[Exception], str]] = [
        (["image"], TypeError, "must map fields to kinds"),
        ({"image": "picture"}, ValueError, "must be one of 'image', 'mask'"),
        ({"mask": "mask"}, ValueError, "must name an image"),
        ({"image": "image", "p": tr.KeyPoints(boxes="b")}, ValueError, "'p' belongs to the boxes 'b', but"),
        ({"image": "image", "b": "boxes", "c": "boxes", "l": "labels"}, ValueError, r"'l' may belong to any of"),
    ]
    for given, error, message in bad:
        assert_raises(error, message, tr.Compose, [], fields=given)
    boxes: Any = tr.BoundingBoxes
    assert_raises(ValueError, "format must be one of", boxes, format="yxyx")
    assert_raises(ValueError, "must not be negative", boxes, min_size=-1)


def test_a_compose_with_fields_is_a_datasets_whole_transform_and_shardios_own() -> None:
    transform = tr.Compose([tr.CenterCrop(3)], fields={"image": "image"})
    for container in (tr.Compose, tr.MultiCrop):
        assert_raises(TypeError, "cannot be part of another Compose or of a MultiCrop", container, [transform])
    assert_raises(TypeError, "pass it to a dataset", transform, make_picture(9, 9))
    foreign = tr.Compose([tr.CenterCrop(3), abs], fields={"image": "image"})
    assert_raises(TypeError, r"abs.* would transform only the image", tr.field_kinds_of, foreign)


def make_matrix(random: np.random.Generator) -> list[float]:
    turned = np.eye(2) + random.uniform(-0.5, 0.5, (2, 2))
    shift = random.uniform(-9, 9, 2)
    return [*turned[0].tolist(), float(shift[0]), *turned[1].tolist(), float(shift[1])]


def move_by_pillow(mask: NDArray[Any], plan: CropPlan, fill: int) -> Image.Image:
    (top, left, height, width), (new_height, new_width) = plan.box[0].tolist(), plan.size[0].tolist()
    image = Image.fromarray(mask).crop((left, top, left + width, top + height))
    resized = image.resize((new_width, new_height), Image.Resampling.NEAREST)
    window_top, window_left, window_height, window_width = plan.window[0].tolist()
    shown = Image.new(image.mode, (window_width, window_height), fill)
    shown.paste(resized, (-window_left, -window_top))
    return shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if plan.flip[0] else shown


def test_everything_in_a_plan_is_known_to_what_follows_it() -> None:
    """The code that moves masks, boxes and points must handle every attribute of a plan (see _sides_of)."""
    known = {"box", "size", "window", "flip", "upside_down", "operations"}
    assert {field.name for field in dataclasses.fields(CropPlan)} == {*known, "resampling"}


def test_other_operations_leave_pixels_where_they_are() -> None:
    random = np.random.default_rng(7)
    image = np.full((60, 60, 3), 90, np.uint8)
    image[25:30, 40:46] = 200
    is_far = np.ones((60, 60), np.bool_)
    is_far[20:35, 35:51] = False
    steps = make_steps(random)
    assert {code for code, _, _ in steps.values()} >= set(codes.MOVING)
    del steps["erase"], steps["vertical flip"]  # Erasing does not move pixels, and a vertical flip is part of the plan.
    for name, (code, numbers, _) in steps.items():
        edited = image.copy()
        edit_images([edited], make_operations(1, code, *numbers))
        assert code in codes.MOVING or (edited[is_far] == edited[0, 0]).all(), name
    shifted = image.copy()
    edit_images([shifted], make_operations(1, codes.AFFINE, 1, 0, 20, 0, 1, 0, 0, 0, 0))
    assert not (shifted[is_far] == shifted[0, 0]).all()


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "uint16", "bool", "int64"])
def test_masks_are_moved_and_turned_as_by_pillows_nearest(dtype: str) -> None:
    """Pillow has no mode for some of these types, but their values fit in its 32-bit mode."""
    random = np.random.default_rng(0)
    for number in range(120):
        height, width = random.integers(1, 90, 2).tolist()
        mask = random.integers(0, 256 if dtype == "uint8" else 60_000, (height, width)).astype(dtype)
        form = mask if dtype in ("uint8", "int32", "float32") else mask.astype(np.int32)
        if number % 3 or dtype == "bool":
            plan, fill = draw_one(random, height, width), int(random.integers(2))
            expected = move_by_pillow(form, plan, fill)
        else:
            matrix, fill = make_matrix(random), 255
            plan = turn(CropPlan.whole(np.array([[height, width]])), matrix)
            size, affine = (width, height), Image.Transform.AFFINE
            expected = Image.fromarray(form).transform(size, affine, matrix, fillcolor=255)
        moved = move_mask(mask, PlanRow(plan, 0), fill)
        assert moved.dtype == mask.dtype
        np.testing.assert_array_equal(moved, np.asarray(expected))


def test_channels_of_a_mask_move_together() -> None:
    random = np.random.default_rng(2)
    mask = random.integers(0, 60_000, (40, 50, 4)).astype(np.uint16)
    plan = turn(draw_one(random, 40, 50), make_matrix(random))
    moved = move_mask(mask, PlanRow(plan, 0), 7)
    for channel in range(4):
        np.testing.assert_array_equal(moved[..., channel], move_mask(mask[..., channel], PlanRow(plan, 0), 7))


def test_what_the_result_does_not_show_has_no_area() -> None:
    step = PlanRow(CropPlan.whole(np.array([[40, 40]])).crop(np.array([[10, 10, 20, 20]])), 0)
    boxes = np.array([[0, 0, 5, 5], [35, 0, 40, 40], [0, 0, 40, 40], [12, 30, 15, 38]], np.float64)
    assert move_boxes(boxes, step).tolist() == [[0, 0, 0, 0], [20, 0, 20, 20], [0, 0, 20, 20], [2, 20, 5, 20]]
    assert move_points(boxes[:, :2], step).tolist() == [[-10, -10], [25, -10], [-10, -10], [2, 20]]
    padded = PlanRow(CropPlan.whole(np.array([[10, 20]])).crop(np.array([[-5, -5, 20, 30]])), 0)
    moved = move_boxes(np.array([[-3.0, -3.0, 40.0, 40.0]]), padded)
    assert moved.tolist() == [[5, 5, 25, 15]], "boxes do not extend into the padding"
    turned = PlanRow(turn(WHOLE, [1, 0.1, 0, 0, 1, 0]), 0)
    assert move_boxes(np.zeros((0, 4)), turned).shape == (0, 4)
    assert move_points(np.zeros((0, 2)), turned).shape == (0, 2)
