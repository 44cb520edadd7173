"""Rotations, affine and perspective transforms: torchvision's parameters and pixels of Pillow images."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from shardio import DataLoader, ShardDataset
from shardio.images import edit_images
from shardio.images.kernel.compiled import operation_records as codes
from shardio.libraries import import_library
from shardio.transforms import (
    CenterCrop,
    ColorJitter,
    Compose,
    PixelTransform,
    RandomAffine,
    RandomPerspective,
    RandomResizedCrop,
    RandomRotation,
    apply_transform,
)
from shardio.transforms.warps import make_affine_matrix, make_perspective_matrix, make_rotation_matrix, make_warps

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")
functional: Any = importlib.import_module("torchvision.transforms.v2.functional")

KEYS = np.random.default_rng(0).integers(0, 2**63, 20_000, dtype=np.uint64)
SIZES = np.full((len(KEYS), 2), (40, 60))
FILL = (7, 250, 130)

Pixels = NDArray[np.uint8]

each_interpolation = pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])


def make_image(random: np.random.Generator) -> Pixels:
    """Return noise of any size, which may have one row or column, or be a square."""
    height, width = random.integers(1, 60, 2).tolist()
    height, width = [(height, width), (1, width), (height, 1), (1, 1), (width, width)][random.integers(5)]
    return random.integers(0, 256, (height, width, 3), np.uint8)


def assert_equal(pixels: Pixels, matrix: Any, interpolation: str, expected: Image.Image) -> None:
    edited = pixels.copy()
    edit_images([edited], make_warps([matrix], interpolation, FILL))
    np.testing.assert_array_equal(edited, np.array(expected), f"{pixels.shape} {matrix}")


@each_interpolation
def test_rotations_give_torchvisions_pixels(interpolation: str) -> None:
    random = np.random.default_rng(0)
    for _ in range(150):
        pixels, center = (
            make_image(random),
            None if random.random() < 0.5 else tuple(random.uniform(-9, 60, 2).tolist()),
        )
        angle = float(random.choice([0, 90, 180, 270, -90, 360, *random.uniform(-400, 400, 6)]))
        expected = functional.rotate(
            Image.fromarray(pixels), angle, interpolation=interpolation, center=center, fill=FILL
        )
        matrix = make_rotation_matrix(pixels.shape[0], pixels.shape[1], angle, center)
        assert_equal(pixels, matrix, interpolation, expected)


@each_interpolation
def test_affine_transforms_give_torchvisions_pixels(interpolation: str) -> None:
    random = np.random.default_rng(1)
    for _ in range(150):
        pixels = make_image(random)
        height, width = pixels.shape[:2]
        center = None if random.random() < 0.5 else tuple(random.uniform(-9, 60, 2).tolist())
        angle, scale = float(random.choice([0, random.uniform(-180, 180)])), float(random.uniform(0.3, 3))
        shift, shear = random.integers(-20, 20, 2).tolist(), random.uniform(-60, 60, 2).tolist()
        expected = functional.affine(
            Image.fromarray(pixels), angle, shift, scale, shear, interpolation=interpolation, center=center, fill=FILL
        )
        matrix = make_affine_matrix(center or (width * 0.5, height * 0.5), angle, shift, scale, shear)
        assert_equal(pixels, matrix, interpolation, expected)


def draw_corners(random: np.random.Generator, height: int, width: int) -> Any:
    """Return corners in the four quarters of an image."""
    near, far = random.integers(0, [(width + 1) // 2, (height + 1) // 2], (4, 2)), np.array([width - 1, height - 1])
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = np.where(random.random((4, 2)) < 0.3, 0, near).tolist()
    return [[x0, y0], [far[0] - x1, y1], [far[0] - x2, far[1] - y2], [x3, far[1] - y3]]


@each_interpolation
def test_perspective_transforms_give_torchvisions_pixels(interpolation: str) -> None:
    random = np.random.default_rng(2)
    for _ in range(150):
        height, width = random.integers(2, 60, 2).tolist()
        pixels, corners = random.integers(0, 256, (height, width, 3), np.uint8), draw_corners(random, height, width)
        matrix = make_perspective_matrix(height, width, corners)
        if matrix is None:
            continue
        expected = functional.perspective(
            Image.fromarray(pixels), None, None, interpolation=interpolation, coefficients=matrix, fill=FILL
        )
        assert_equal(pixels, matrix, interpolation, expected)


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
    np.testing.assert_array_equal(RandomPerspective(p=1)(image), image)


def test_angles_are_uniform() -> None:
    drawn = RandomRotation((-20, 70), center=(0, 0)).draw(SIZES, KEYS)["numbers"][:, 0]
    angles = np.rad2deg(np.arctan2(drawn[:, 3], drawn[:, 0]))
    assert_uniform(angles, -20, 70)
    assert_uniform(RandomRotation(30, expand=True).draw(SIZES, KEYS), -30, 30)


def test_the_parameters_of_affine_transforms_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Any]()

    def note(center: Any, angle: float, shift: Any, scale: float, shear: Any) -> list[float]:
        drawn.append([*center, angle, *shift, scale, *shear])
        return [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]

    monkeypatch.setattr("shardio.transforms.warps.make_affine_matrix", note)
    RandomAffine(10, (0.5, 0.1), (0.5, 2), (-3, 4, 5, 9)).draw(SIZES, KEYS)
    center_x, center_y, angle, shift_x, shift_y, scale, shear_x, shear_y = np.array(drawn).T
    assert (set(center_x), set(center_y)) == ({30.0}, {20.0})
    for values, low, high in ((angle, -10, 10), (scale, 0.5, 2), (shear_x, -3, 4), (shear_y, 5, 9)):
        assert_uniform(values, low, high)
    assert set(shift_x) == set(range(-30, 31))
    assert set(shift_y) == set(range(-4, 5))
    counts = np.unique(shift_x, return_counts=True)[1]
    assert counts[1:-1] == pytest.approx(len(KEYS) / 60, rel=0.3)
    assert counts[[0, -1]] == pytest.approx(len(KEYS) / 120, rel=0.4), "half as many are rounded to the ends"
    drawn.clear()
    RandomAffine(0, shear=5, center=(3, 4)).draw(SIZES, KEYS)
    center_x, center_y, angle, shift_x, shift_y, scale, shear_x, shear_y = np.array(drawn).T
    assert_uniform(shear_x, -5, 5)
    for values, only in zip(
        (center_x, center_y, angle, shift_x, shift_y, scale, shear_y), (3, 4, *[0] * 3, 1, 0), strict=True
    ):
        assert set(values) == {only}


def test_corners_are_uniform_within_torchvisions_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Any]()
    monkeypatch.setattr(
        "shardio.transforms.warps.make_perspective_matrix", lambda height, width, corners: drawn.append(corners)
    )
    RandomPerspective(0.6, p=1).draw(SIZES, KEYS)
    corners = np.array(drawn)
    first = np.array([[0, 0], [41, 0], [41, 27], [0, 27]])  # Up to 18 of 60 pixels and 12 of 40.
    for corner in range(4):
        for axis, count in enumerate((19, 13)):
            values = corners[:, corner, axis] - first[corner, axis]
            frequencies = np.bincount(values, minlength=count)
            assert len(frequencies) == count
            assert ((frequencies - len(KEYS) / count) ** 2 / (len(KEYS) / count)).sum() < 50, "at most 18 degrees"


def assert_uniform(values: Any, low: float, high: float) -> None:
    unit = (np.sort(values) - low) / (high - low)
    assert 0 <= unit[0] <= unit[-1] <= 1
    assert np.abs(unit - (np.arange(len(unit)) + 0.5) / len(unit)).max() < 0.015


def test_the_probability_is_kept() -> None:
    for p in (0.0, 0.3, 1.0):
        changed = RandomPerspective(p=p).draw(SIZES, KEYS)["code"] == codes.PERSPECTIVE
        assert changed.mean() == pytest.approx(p, abs=0.02)


@each_interpolation
def test_expanded_rotations_give_torchvisions_pixels_and_sizes(interpolation: str) -> None:
    random = np.random.default_rng(4)
    for angle in (0, 30, 90, -123.4):
        pixels = make_image(random)
        transform = RandomRotation((angle, angle), interpolation, expand=True, fill=FILL)
        expected = functional.rotate(Image.fromarray(pixels), angle, interpolation, True, fill=FILL)
        np.testing.assert_array_equal(transform(pixels), np.array(expected))


def test_steps_after_an_expanded_rotation_get_its_result() -> None:
    image = np.random.default_rng(5).integers(0, 256, (40, 60, 3), np.uint8)
    rotation = RandomRotation((90, 90), expand=True)
    (result,) = apply_transform(Compose([rotation, CenterCrop((60, 40))]), [image], KEYS[:1])
    np.testing.assert_array_equal(result, np.rot90(image))


@pytest.mark.parametrize(
    "transform", [RandomRotation(30), RandomAffine(30, (0.1, 0.1)), RandomPerspective(p=1)], ids=repr
)
def test_an_image_keeps_its_size_and_the_original_its_pixels(transform: PixelTransform) -> None:
    image = np.random.default_rng(6).integers(0, 256, (19, 24, 3), np.uint8)
    kept = image.copy()
    results = [transform(image) for _ in range(20)]
    assert {result.shape for result in results} == {image.shape}
    assert len({result.tobytes() for result in results}) > 10
    np.testing.assert_array_equal(image, kept)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomRotation(-1), "degrees must be a number that is not negative or 2 bounds"),
        (lambda: RandomRotation((2, 1)), "degrees must be a number that is not negative or 2 bounds"),
        (lambda: RandomRotation(1, center=(1,)), "center must be two numbers"),
        (lambda: RandomRotation(1, "lanczos"), "interpolation must be 'nearest', 'bilinear' or 'bicubic'"),
        (lambda: RandomAffine(1, translate=(0.5, 2)), "translate must be two numbers from 0 to 1"),
        (lambda: RandomAffine(1, scale=(0, 1)), "scale must be"),
        (lambda: RandomAffine(1, shear=(1, 2, 3)), "shear must be a number that is not negative or 2 or 4 bounds"),
        (lambda: RandomAffine(1, fill=300), "fill must be a number from 0 to 255"),
        (lambda: RandomPerspective(1.5), "distortion_scale must be from 0 to 1"),
        (lambda: RandomPerspective(p=2), "p must be a probability"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_constants_of_other_libraries_are_accepted() -> None:
    for name in ("NEAREST", "BILINEAR", "BICUBIC"):
        for constant in (v2.InterpolationMode[name], Image.Resampling[name], int(Image.Resampling[name])):
            assert RandomRotation(1, constant).interpolation == name.lower()


def test_the_loader_gives_the_same_images_with_worker_processes(packed: Path) -> None:
    transform = Compose([RandomResizedCrop(32), RandomRotation(20, "bilinear"), ColorJitter(0.4), RandomPerspective()])

    def load(num_workers: int) -> Any:
        dataset = ShardDataset(packed, fields=("image",), transform=transform, shuffle=True)
        loader = DataLoader(dataset, 4, num_workers=num_workers)
        assert not loader.calls_dataset, "shardio's own executors make the batches"
        return torch.cat([images for (images,) in loader])

    assert torch.equal(load(0), load(1))
