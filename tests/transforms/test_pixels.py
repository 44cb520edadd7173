"""Colors, blurs, floating-point images, padding, warps and erasing match torchvision's distributions and pixels."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from shardio import DataLoader, ShardDataset, transforms as tr
from shardio.errors import SampleError
from shardio.images import DecodeError, edit_images
from shardio.kernel import operations as codes
from shardio.transforms.warps import make_affine_matrix, make_perspective_matrix, make_rotation_matrix, make_warps
from tests.transforms.by_torchvision import functional, v2
from tests.transforms.inputs import (
    NUM_DRAWS,
    THRESHOLD,
    assert_uniform,
    chi_square,
    ks_distance,
    make_noise,
    make_rng_keys,
    repeat_size,
)

KEYS, SIZES, FILL = make_rng_keys(NUM_DRAWS), repeat_size(40, 60, NUM_DRAWS), (7, 250, 130)
JITTERED = (codes.BRIGHTNESS, codes.CONTRAST, codes.SATURATION, codes.HUE)


def test_factors_are_uniform_within_torchvisions_bounds() -> None:
    operations = tr.ColorJitter(0.4, (0.2, 3.0), 1.5, 0.1).draw(SIZES, KEYS)
    drawn = {code: operations["numbers"][operations["code"] == code, 0] for code in JITTERED}
    assert {len(values) for values in drawn.values()} == {NUM_DRAWS}
    for code, (low, high) in zip(JITTERED, ((0.6, 1.4), (0.2, 3.0), (0.0, 2.5)), strict=False):
        assert_uniform(drawn[code], low, high)
    hues = drawn[codes.HUE]
    assert_uniform(np.where(hues > 127, hues - 256, hues), -25.5, 25.5, 1 / 25)  # Hues are whole numbers.
    operations = tr.ColorJitter(contrast=0.4, hue=0.0).draw(SIZES, KEYS)
    assert set(np.unique(operations["code"])) == {codes.NONE, codes.CONTRAST}
    np.testing.assert_array_equal(tr.ColorJitter()(make_noise(9, 7)), make_noise(9, 7))


def test_all_orders_are_equally_frequent() -> None:
    drawn = Counter(map(tuple, tr.ColorJitter(0.4, 0.4, 0.4, 0.1).draw(SIZES, KEYS)["code"].tolist()))
    assert set(drawn) == set(permutations(JITTERED))
    each = NUM_DRAWS / 24
    assert sum((count - each) ** 2 / each for count in drawn.values()) < 60, "23 degrees of freedom"


RANDOM: dict[str, Any] = {
    "grayscale": tr.RandomGrayscale,
    "invert": tr.RandomInvert,
    "autocontrast": tr.RandomAutocontrast,
    "equalize": tr.RandomEqualize,
    "solarize": lambda p: tr.RandomSolarize(130.5, p),
    "posterize": lambda p: tr.RandomPosterize(3, p),
    "sharpness": lambda p: tr.RandomAdjustSharpness(1.5, p),
    "perspective": lambda p: tr.RandomPerspective(p=p),
    "erasing": tr.RandomErasing,
    "mirrored": tr.RandomHorizontalFlip,
    "upside down": tr.RandomVerticalFlip,
}


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_the_probability_is_kept(name: str) -> None:
    image = 40 + make_noise(40, 30) // 2
    for p in (0.0, 0.3, 1.0):
        drawn = RANDOM[name](p).draw(SIZES, KEYS)
        changed = drawn["code"] != codes.NONE if drawn.dtype.names else drawn
        assert changed.mean() == pytest.approx(p, abs=4 * (p * (1 - p) / NUM_DRAWS) ** 0.5)
        assert p == 0.3 or (RANDOM[name](p)(image) != image).any() == bool(p)
    assert "p=0.25" in repr(RANDOM[name](0.25))


def test_blurs_are_torchvisions_with_uniform_deviations_that_are_the_same_in_both_directions() -> None:
    numbers = tr.GaussianBlur((23, 5), (0.1, 2.0)).draw(SIZES, KEYS)["numbers"][:, 0]
    assert set(numbers[:, 0]) == {2}, "the vertical radius"
    assert set(numbers[:, 2]) == {11}, "the horizontal radius"
    np.testing.assert_array_equal(numbers[:, 1], numbers[:, 3])
    assert_uniform(np.sqrt(-0.5 / np.log(numbers[:, 1])), 0.1, 2.0, THRESHOLD)
    for arguments in [(3,), ([3, 5],), (5, 1.5), ((7, 1), (0.5, 3.0))]:
        ours, theirs = tr.GaussianBlur(*arguments), v2.GaussianBlur(*arguments)  # type: ignore[arg-type]
        assert (list(ours.kernel_size), list(ours.sigma)) == (list(theirs.kernel_size), list(theirs.sigma))


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_floating_point_images_are_exactly_torchvisions(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr("shardio.images.rendering.find_functions", lambda: None)
    to_floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    for size in [(1, 1), (3, 3), (7, 33), (64, 50)]:
        image = make_noise(*size)
        expected = v2.Compose([*to_floats, v2.Normalize(MEAN, STD)])(image).numpy()
        for begin in ([tr.ToDtype("float32", scale=True)], []):
            normalized = tr.Compose([*begin, tr.Normalize(MEAN, STD)])(image)
            np.testing.assert_array_equal(normalized, expected, strict=True)
        for dtype in (torch.float32, np.float32, "float32"):
            scaled = tr.ToDtype(dtype, scale=True)(image)
            np.testing.assert_array_equal(scaled, v2.Compose(to_floats)(image).numpy(), strict=True)


MODES = ["constant", "edge", "reflect", "symmetric"]

Pixels = NDArray[np.uint8]


@pytest.mark.parametrize("mode", MODES)
def test_padding_gives_torchvisions_pixels(mode: Any) -> None:
    paddings: list[Any] = [0, 3, (1, 4), (2, 0, 3, 5)]
    fills: list[Any] = [0, 77, FILL]
    for padding, fill, size in product(paddings, fills, ((8, 9), (6, 20), (30, 6))):
        image = make_noise(*size)
        expected = functional.pad(Image.fromarray(image), padding, fill, mode)
        np.testing.assert_array_equal(tr.Pad(padding, fill, mode)(image), np.array(expected))


@pytest.mark.parametrize("mode", MODES)
def test_a_random_crop_is_a_crop_of_the_padded_image(mode: Any) -> None:
    transform, keys = tr.RandomCrop((10, 8), (2, 5, 4, 1), fill=9, padding_mode=mode), make_rng_keys(50)
    image = make_noise(12, 14)
    padded = tr.Pad((2, 5, 4, 1), 9, mode)(image)
    boxes = transform.draw(repeat_size(12, 14, 50), keys)
    for box, cropped in zip(boxes.tolist(), tr.apply_transform(transform, [image] * 50, keys), strict=True):
        top, left = box[0] + 5, box[1] + 2
        np.testing.assert_array_equal(cropped, padded[top : top + 10, left : left + 8])


@pytest.mark.parametrize(
    ("size", "crop", "padding", "if_needed"),
    [
        ((32, 32), 32, 4, False),
        ((20, 50), (20, 30), None, False),
        ((9, 40), 30, None, True),
        ((9, 9), 30, (1, 2), True),
    ],
)
def test_the_places_of_crops_are_torchvisions_and_uniform(size: Any, crop: Any, padding: Any, if_needed: bool) -> None:
    boxes = tr.RandomCrop(crop, padding, if_needed).draw(repeat_size(size[0], size[1], NUM_DRAWS), KEYS)
    theirs, image, seen = v2.RandomCrop(crop, padding, if_needed), Image.new("RGB", size[::-1]), []
    for _ in range(1000):
        drawn = theirs.make_params([image])
        seen.append((drawn["top"] - drawn["padding"][1], drawn["left"] - drawn["padding"][0]))
        assert (drawn["height"], drawn["width"]) == tuple(boxes[0, 2:])
    for side, places in enumerate(zip(*seen, strict=True)):
        ours = boxes[:, side]
        assert {ours.min(), ours.max()} == {min(places), max(places)}, "1,000 draws contain all of at most 60 places"
        count = int(np.ptp(ours)) + 1
        assert chi_square(ours - ours.min(), count) < count + 5 * (2 * count) ** 0.5


def test_corner_crops_and_the_center_are_torchvisions_five_crops(packed: Path) -> None:
    image = make_noise(20, 31)
    expected = functional.five_crop(Image.fromarray(image), [7, 12])
    for crop, wanted in zip(tr.FiveCrop((7, 12))(image), expected, strict=True):
        np.testing.assert_array_equal(crop, np.array(wanted))
    transform = tr.FiveCrop(24, before=[tr.Resize(40)], after=[tr.RandomInvert(1)])
    assert tr.is_builtin(transform)
    (crops,) = next(iter(DataLoader(ShardDataset(packed, fields=("image",), transform=transform), 2)))
    (whole,) = next(iter(ShardDataset(packed, fields=("image",), transform=tr.Resize(40))))
    for found, wanted in zip(crops, functional.five_crop(whole, [24, 24]), strict=True):
        assert torch.equal(found[0], 255 - wanted)


def test_an_image_that_is_too_small_is_named_with_the_remedy(packed: Path) -> None:
    too_small = r"needs at least 50×50 pixels, but the image has 20×60: set pad_if_needed=True"
    with pytest.raises(DecodeError, match=too_small):
        tr.apply_transform(tr.RandomCrop(50), [make_noise(60, 60), make_noise(60, 20)], make_rng_keys(2))
    with pytest.raises(DecodeError, match=r"CornerCrop.* needs at least 9×9 pixels"):
        tr.CornerCrop(9, "top left")(make_noise(60, 5))
    dataset = ShardDataset(packed, fields=("image",), transform=tr.RandomCrop(5000))
    with pytest.raises(SampleError, match=r"image of sample .* in .*shard-.*: RandomCrop.* needs at least 5000×5000"):
        next(iter(DataLoader(dataset, 2)))


# Warps.


def make_image(random: np.random.Generator) -> Pixels:
    """Return an image of noise, of any size; it may be square, or have a single row or column."""
    height, width = random.integers(1, 60, 2).tolist()
    height, width = [(height, width), (1, width), (height, 1), (1, 1), (width, width)][random.integers(5)]
    return random.integers(0, 256, (height, width, 3), np.uint8)


def draw_corners(random: np.random.Generator, height: int, width: int) -> Any:
    near, far = random.integers(0, [(width + 1) // 2, (height + 1) // 2], (4, 2)), np.array([width - 1, height - 1])
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = np.where(random.random((4, 2)) < 0.3, 0, near).tolist()
    return [[x0, y0], [far[0] - x1, y1], [far[0] - x2, far[1] - y2], [x3, far[1] - y3]]


Warp = tuple[Any, Callable[..., Image.Image]]
"""A matrix, and torchvision's function that warps an image with the same parameters."""


def draw_center(random: np.random.Generator) -> Any:
    return None if random.random() < 0.5 else tuple(random.uniform(-9, 60, 2).tolist())


def draw_rotation(random: np.random.Generator, height: int, width: int) -> Warp:
    center, angle = (
        draw_center(random),
        float(random.choice([0, 90, 180, 270, -90, 360, *random.uniform(-400, 400, 6)])),
    )
    return make_rotation_matrix(height, width, angle, center), partial(functional.rotate, angle=angle, center=center)


def draw_affine(random: np.random.Generator, height: int, width: int) -> Warp:
    center, angle = draw_center(random), float(random.choice([0, random.uniform(-180, 180)]))
    scale = float(random.uniform(0.3, 3))
    shift, shear = random.integers(-20, 20, 2).tolist(), random.uniform(-60, 60, 2).tolist()
    given = {"angle": angle, "translate": shift, "scale": scale, "shear": shear, "center": center}
    matrix = make_affine_matrix(center or (width * 0.5, height * 0.5), angle, shift, scale, shear)
    return matrix, partial(functional.affine, **given)


def draw_perspective(random: np.random.Generator, height: int, width: int) -> Warp:
    matrix = make_perspective_matrix(height, width, draw_corners(random, height, width))
    return matrix, partial(functional.perspective, startpoints=None, endpoints=None, coefficients=matrix)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize(("seed", "draw"), [(0, draw_rotation), (1, draw_affine), (2, draw_perspective)])
def test_warps_give_torchvisions_pixels(seed: int, draw: Callable[..., Warp], interpolation: str) -> None:
    random = np.random.default_rng(seed)  # With different seeds, torchvision rounds a few pixels differently.
    for number in range(150):
        pixels = make_image(random)
        if draw is draw_perspective and min(pixels.shape[:2]) < 2:
            continue
        matrix, by_torchvision = draw(random, *pixels.shape[:2])
        options: dict[str, Any] = {"interpolation": interpolation, "fill": FILL}
        if matrix is not None:
            edited = pixels.copy()
            edit_images([edited], make_warps([matrix], interpolation, FILL))
            expected = by_torchvision(Image.fromarray(pixels), **options)
            np.testing.assert_array_equal(edited, np.array(expected), f"{pixels.shape} {matrix}")
        if number < 20 and draw is draw_rotation:
            angle = by_torchvision.keywords["angle"]  # type: ignore[attr-defined]  # a functools.partial
            expanded = tr.RandomRotation((angle, angle), interpolation, expand=True, fill=FILL)(pixels)
            expected = functional.rotate(Image.fromarray(pixels), angle, expand=True, **options)
            np.testing.assert_array_equal(expanded, np.array(expected))


def test_perspective_matrices_are_torchvisions_except_for_zeros() -> None:
    solve = importlib.import_module("torchvision.transforms.functional")._get_perspective_coeffs
    random = np.random.default_rng(3)
    for _ in range(200):
        height, width = random.integers(2, 500, 2).tolist()
        corners = draw_corners(random, height, width)
        if (ours := make_perspective_matrix(height, width, corners)) is not None:
            before = [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]]
            theirs = np.array(solve(before, corners))
            assert ours == np.where(np.array(ours) == 0, np.where(np.abs(theirs) < 1e-11, 0, theirs), theirs).tolist()


def test_a_perspective_whose_corners_are_on_a_line_does_not_exist() -> None:
    assert make_perspective_matrix(9, 1, [(0, 0), (0, 0), (0, 8), (0, 8)]) is None
    assert make_perspective_matrix(9, 9, [(4, 0), (4, 0), (8, 8), (0, 8)]) is None
    image = np.arange(3 * 9, dtype=np.uint8).reshape(9, 1, 3)
    np.testing.assert_array_equal(tr.RandomPerspective(p=1)(image), image)


def test_steps_after_an_expanded_rotation_get_its_result() -> None:
    image, rotation = make_noise(40, 60), tr.RandomRotation((90, 90), expand=True)
    (result,) = tr.apply_transform(tr.Compose([rotation, tr.CenterCrop((60, 40))]), [image], KEYS[:1])
    np.testing.assert_array_equal(result, np.rot90(image))


def test_angles_are_uniform() -> None:
    drawn = tr.RandomRotation((-20, 70), center=(0, 0)).draw(SIZES, KEYS)["numbers"][:, 0]
    assert_uniform(np.rad2deg(np.arctan2(drawn[:, 3], drawn[:, 0])), -20, 70)
    assert_uniform(tr.RandomRotation(30, expand=True).draw(SIZES, KEYS), -30, 30)


def test_the_parameters_of_affine_transforms_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Any]()

    def note(center: Any, angle: float, shift: Any, scale: float, shear: Any) -> list[float]:
        drawn.append([*center, angle, *shift, scale, *shear])
        return [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]

    monkeypatch.setattr("shardio.transforms.warps.make_affine_matrix", note)
    tr.RandomAffine(10, (0.5, 0.1), (0.5, 2), (-3, 4, 5, 9)).draw(SIZES, KEYS)
    center_x, center_y, angle, shift_x, shift_y, scale, shear_x, shear_y = np.array(drawn).T
    assert (set(center_x), set(center_y)) == ({30.0}, {20.0})
    for values, low, high in ((angle, -10, 10), (scale, 0.5, 2), (shear_x, -3, 4), (shear_y, 5, 9)):
        assert_uniform(values, low, high)
    assert set(shift_x) == set(range(-30, 31))
    assert set(shift_y) == set(range(-4, 5))
    counts = np.unique(shift_x, return_counts=True)[1]
    assert counts[1:-1] == pytest.approx(NUM_DRAWS / 60, rel=0.3)
    assert counts[[0, -1]] == pytest.approx(NUM_DRAWS / 120, rel=0.4), "half as many values are rounded to each end"
    drawn.clear()
    tr.RandomAffine(0, shear=5, center=(3, 4)).draw(SIZES, KEYS)
    columns = np.array(drawn).T
    assert_uniform(columns[6], -5, 5)
    assert [set(columns[i]) for i in (0, 1, 2, 3, 4, 5, 7)] == [{3}, {4}, {0}, {0}, {0}, {1}, {0}]


def test_corners_are_uniform_within_torchvisions_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Any]()
    monkeypatch.setattr(
        "shardio.transforms.warps.make_perspective_matrix", lambda height, width, corners: drawn.append(corners)
    )
    tr.RandomPerspective(0.6, p=1).draw(SIZES, KEYS)
    first = np.array([[0, 0], [41, 0], [41, 27], [0, 27]])  # Corners move by up to 18 of 60 and 12 of 40 pixels.
    for corner in range(4):
        for axis, count in enumerate((19, 13)):
            values = np.array(drawn)[:, corner, axis] - first[corner, axis]
            assert chi_square(values, count) < 50, "at most 18 degrees of freedom"


# Erasing.


@pytest.mark.parametrize("size", [(224, 224), (30, 90), (4, 3), (1, 1)])
def test_parts_are_drawn_as_torchvision_draws_them(size: tuple[int, int]) -> None:
    count = 4000
    torch.manual_seed(0)
    theirs, image = v2.RandomErasing(1.0), torch.zeros(3, *size)
    drawn = [theirs.make_params([image]) for _ in range(count)]
    expected = np.array([[one["i"], one["j"], one["h"], one["w"]] for one in drawn if one["v"] is not None])
    operations = tr.RandomErasing(1.0).draw(repeat_size(*size, NUM_DRAWS), KEYS)[:, 0]
    parts = operations["numbers"][operations["code"] == codes.ERASE, :4]
    assert len(parts) / NUM_DRAWS == pytest.approx(len(expected) / count, abs=0.03)
    if len(expected):
        limit = 1.95 * (1 / len(expected) + 1 / len(parts)) ** 0.5
        for column in range(4):
            assert ks_distance(parts[:, column], expected[:, column]) < limit


def test_a_part_within_the_image_becomes_the_color() -> None:
    image, transform = make_noise(40, 60), tr.RandomErasing(1.0, value=(1, 2, 3))
    for key in make_rng_keys(20):
        (operation,) = transform.draw(repeat_size(40, 60, 1), np.array([key]))
        top, left, height, width = map(int, operation["numbers"][0, :4])
        expected = image.copy()
        expected[top : top + height, left : left + width] = (1, 2, 3)
        assert expected[top : top + height, left : left + width].shape == (height, width, 3)
        np.testing.assert_array_equal(transform.apply(image, operation), expected)
