"""Resizes, crops and flips follow torchvision's published rules, which the tests compute in plain code, one image at a
time."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from PIL import Image

from shardio.transforms import CenterCrop, RandomResizedCrop, Resize
from tests.transforms.inputs import NUM_DRAWS, THRESHOLD, ks_distance, make_noise, make_rng_keys, repeat_size

Box = tuple[int, int, int, int]
Bounds = tuple[float, float]
Size = tuple[int, int]


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), size=st.integers(1, 1000))
def test_one_number_is_the_shorter_side_and_the_longer_is_rounded_down(height: int, width: int, size: int) -> None:
    new_size = Resize(size).draw(repeat_size(height, width, 1), make_rng_keys(1))[0]
    longer = int(size * max(height, width) / min(height, width))
    assert new_size.tolist() == ([longer, size] if width <= height else [size, longer])


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", [Resize, RandomResizedCrop])
def test_an_antialiased_resize_has_pillows_pixels(kind: Any, mode: str) -> None:
    """No crop in this test shrinks its height more than its width, so all versions of Pillow agree."""
    image, size = make_noise(60, 90), (40, 51)
    whole: dict[str, Any] = {"scale": (1, 1), "ratio": (1.5, 1.5)} if kind is RandomResizedCrop else {}
    expected = Image.fromarray(image).resize(size[::-1], Image.Resampling[mode.upper()])
    transform = kind(size, interpolation=mode, antialias=True, **whole)
    np.testing.assert_array_equal(transform(image), np.asarray(expected))
    for bad, message in (("nearest", "'bilinear' or 'bicubic', got 'nearest'"), ("bicubic", "requires antialias=True")):
        with pytest.raises(ValueError, match=message):
            kind(8, interpolation=bad)


sides = st.integers(1, 40)


@given(height=sides, width=sides, rows=sides, columns=sides)
def test_center_crop_is_torchvisions_pad_and_crop(height: int, width: int, rows: int, columns: int) -> None:
    image, below, right = make_noise(height, width), max(rows - height, 0), max(columns - width, 0)
    padded = np.pad(image, ((below // 2, -(-below // 2)), (right // 2, -(-right // 2)), (0, 0)))
    top, left = round((len(padded) - rows) / 2), round((padded.shape[1] - columns) / 2)
    result = CenterCrop((rows, columns))(image)
    np.testing.assert_array_equal(result, padded[top : top + rows, left : left + columns], strict=True)


# RandomResizedCrop.


def draw_crop(height: int, width: int, scale: Bounds, ratio: Bounds, generator: random.Random) -> Box | None:
    """Draw a box as torchvision does, or return None if no box fits in ten attempts."""
    for _ in range(10):
        area = height * width * generator.uniform(*scale)
        aspect = math.exp(generator.uniform(math.log(ratio[0]), math.log(ratio[1])))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top, left = generator.randint(0, height - crop_height), generator.randint(0, width - crop_width)
            return top, left, crop_height, crop_width
    return None


def central_crop(height: int, width: int, ratio: Bounds) -> Box:
    """Return torchvision's central crop, but with at least one pixel, because torchvision fails if there is none."""
    crop_height, crop_width = height, width
    if width / height < ratio[0]:
        crop_height = max(round(width / ratio[0]), 1)
    elif width / height > ratio[1]:
        crop_width = max(round(height * ratio[1]), 1)
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def bounds(low: float, high: float) -> st.SearchStrategy[Bounds]:
    return st.tuples(st.floats(low, high), st.floats(low, high)).map(lambda pair: (min(pair), max(pair)))


lengths = st.one_of(st.integers(1, 40), st.integers(1, 5000))


@given(lengths, lengths, bounds(0.001, 1), bounds(0.05, 20), st.integers(0, 2**32))
def test_boxes_keep_the_bounds_or_are_the_fallback(
    height: int, width: int, scale: Bounds, ratio: Bounds, seed: int
) -> None:
    boxes = RandomResizedCrop(8, scale, ratio).draw(repeat_size(height, width, 20), make_rng_keys(20, seed)).tolist()
    for top, left, rows, columns in boxes:
        assert 0 <= top < top + rows <= height
        assert 0 <= left < left + columns <= width
        if (top, left, rows, columns) == central_crop(height, width, ratio):
            continue
        # Both sides are rounded to whole pixels.
        slack = 1 + 1e-9
        assert (rows - 0.5) * (columns - 0.5) <= scale[1] * height * width * slack
        assert (rows + 0.5) * (columns + 0.5) * slack >= scale[0] * height * width
        assert (columns - 0.5) / (rows + 0.5) <= ratio[1] * slack
        assert (columns + 0.5) / (rows - 0.5) * slack >= ratio[0]


LONG = [(1, 1), (1, 9), (1, 1000), (1000, 1), (3, 1000), (1000, 3), (7, 100), (100, 7), (11, 301), (301, 11)]
NEARLY_SQUARE = [(100, 100), (120, 100), (100, 125)]


@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (0.5, 2.0), (0.9, 1.1), (1.0, 1.0), (2.0, 3.0)])
def test_if_no_box_fits_the_crop_is_torchvisions_central_one(ratio: Bounds) -> None:
    """A box with the area of the whole image fits only if the image itself has an allowed ratio."""
    for size in [*LONG, *NEARLY_SQUARE]:
        boxes = RandomResizedCrop(8, scale=(1.0, 1.0), ratio=ratio).draw(repeat_size(*size, 40), make_rng_keys(40))
        np.testing.assert_array_equal(boxes, np.tile(central_crop(*size, ratio), (40, 1)))
        if ratio[0] <= size[1] / size[0] <= ratio[1]:
            assert boxes[0].tolist() == [0, 0, *size]


CASES: dict[str, tuple[int, int, Bounds, Bounds]] = {
    "photograph": (375, 500, (0.08, 1.0), (3 / 4, 4 / 3)),
    "few pixels": (9, 11, (0.08, 1.0), (3 / 4, 4 / 3)),
    "wide, many misfits": (100, 400, (0.08, 1.0), (3 / 4, 4 / 3)),
    "high, many misfits": (400, 100, (0.2, 1.0), (3 / 4, 4 / 3)),
    "wide ratios": (300, 300, (0.05, 0.3), (1 / 4, 4.0)),
    "uneven ratios": (240, 320, (0.3, 0.6), (0.5, 3.0)),
}


def describe(boxes: NDArray[np.int64], height: int, width: int) -> dict[str, NDArray[np.float64]]:
    top, left, rows, columns = boxes.T
    return {
        "area share": rows * columns / (height * width),
        "log aspect": np.log(columns / rows),
        "height": rows / height,
        "width": columns / width,
        "relative top": top / np.maximum(height - rows, 1),
        "relative left": left / np.maximum(width - columns, 1),
    }


@pytest.mark.parametrize("case", CASES)
def test_crops_have_torchvisions_distribution(case: str) -> None:
    """Area, aspect and corner would correlate if they were drawn from the same random words."""
    height, width, scale, ratio = CASES[case]
    ours = RandomResizedCrop(8, scale, ratio).draw(repeat_size(height, width, NUM_DRAWS), make_rng_keys(NUM_DRAWS))
    generator, fallback = random.Random(2), central_crop(height, width, ratio)
    theirs = [draw_crop(height, width, scale, ratio, generator) or fallback for _ in range(NUM_DRAWS)]
    drawn, expected = (describe(np.array(boxes), height, width) for boxes in (ours, theirs))
    for figure, values in drawn.items():
        references = expected[figure]
        assert ks_distance(values, references) < THRESHOLD, figure
        assert abs(values.mean() - references.mean()) < 4 * references.std() * (2 / NUM_DRAWS) ** 0.5, figure
    correlations = [np.corrcoef(np.stack(list(figures.values()))) for figures in (drawn, expected)]
    assert np.abs(correlations[0] - correlations[1]).max() < 0.035
