"""RandomResizedCrop draws from torchvision's distribution: samples of both are compared."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from shardio.transforms import RandomHorizontalFlip, RandomResizedCrop
from tests.transforms.inputs import make_rng_keys, repeat_size
from tests.transforms.reference import central_crop, draw_crop

NUM_DRAWS = 20_000

THRESHOLD = 1.95 * (2 / NUM_DRAWS) ** 0.5
"""Two samples of one distribution exceed it once in a thousand cases (Kolmogorov-Smirnov). Seeds are fixed."""

Settings = tuple[int, int, tuple[float, float], tuple[float, float]]

CASES: dict[str, Settings] = {
    "photograph": (375, 500, (0.08, 1.0), (3 / 4, 4 / 3)),
    "few pixels": (9, 11, (0.08, 1.0), (3 / 4, 4 / 3)),
    "wide, many misfits": (100, 400, (0.08, 1.0), (3 / 4, 4 / 3)),
    "high, many misfits": (400, 100, (0.2, 1.0), (3 / 4, 4 / 3)),
    "wide ratios": (300, 300, (0.05, 0.3), (1 / 4, 4.0)),
    "uneven ratios": (240, 320, (0.3, 0.6), (0.5, 3.0)),
}


@cache
def _draw(case: str) -> NDArray[np.int64]:
    height, width, scale, ratio = CASES[case]
    return RandomResizedCrop(8, scale, ratio).draw(repeat_size(height, width, NUM_DRAWS), make_rng_keys(NUM_DRAWS))


@cache
def _draw_reference(case: str) -> NDArray[np.int64]:
    height, width, scale, ratio = CASES[case]
    random = np.random.default_rng(2)
    fallback = central_crop(height, width, ratio)
    return np.array([draw_crop(height, width, scale, ratio, random) or fallback for _ in range(NUM_DRAWS)])


def _describe(boxes: NDArray[np.int64], case: str) -> dict[str, NDArray[np.float64]]:
    height, width, _, _ = CASES[case]
    top, left, rows, columns = boxes.T
    return {
        "area share": rows * columns / (height * width),
        "log aspect": np.log(columns / rows),
        "height": rows / height,
        "width": columns / width,
        "relative top": top / np.maximum(height - rows, 1),
        "relative left": left / np.maximum(width - columns, 1),
    }


def ks_distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Return the largest difference of the two cumulative distributions."""
    values = np.unique(np.concatenate([a, b]))
    shares = [np.searchsorted(np.sort(sample), values, side="right") / len(sample) for sample in (a, b)]
    return float(np.abs(shares[0] - shares[1]).max())


@pytest.mark.parametrize("case", CASES)
def test_crops_have_torchvisions_distribution(case: str) -> None:
    drawn, expected = _describe(_draw(case), case), _describe(_draw_reference(case), case)
    for figure, values in drawn.items():
        references = expected[figure]
        assert ks_distance(values, references) < THRESHOLD, figure
        assert abs(values.mean() - references.mean()) < 4 * references.std() * (2 / NUM_DRAWS) ** 0.5, figure


@pytest.mark.parametrize("case", CASES)
def test_properties_of_crops_correlate_as_torchvisions(case: str) -> None:
    """If area, aspect and corner were drawn from the same random words, they would correlate."""
    correlations = [
        np.corrcoef(np.stack(list(_describe(boxes, case).values()))) for boxes in (_draw(case), _draw_reference(case))
    ]
    assert np.abs(correlations[0] - correlations[1]).max() < 0.035


def test_every_corner_of_a_box_is_equally_likely() -> None:
    """A box of 2x2 pixels in 6x5: its corner is in rows 0 to 4 and columns 0 to 3, both inclusive."""
    crop = RandomResizedCrop(8, scale=(4 / 30, 4 / 30), ratio=(1.0, 1.0))
    boxes = crop.draw(repeat_size(6, 5, NUM_DRAWS), make_rng_keys(NUM_DRAWS))
    assert (boxes[:, 2:] == 2).all()
    counts = np.zeros((5, 4))
    np.add.at(counts, (boxes[:, 0], boxes[:, 1]), 1)
    assert np.abs(counts / NUM_DRAWS - 1 / 20).max() < 4 * (1 / 20 * 19 / 20 / NUM_DRAWS) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_images_are_mirrored_with_probability_p(p: float) -> None:
    flips = RandomHorizontalFlip(p).draw(repeat_size(4, 4, NUM_DRAWS), make_rng_keys(NUM_DRAWS))
    assert abs(flips.mean() - p) < 4 * (p * (1 - p) / NUM_DRAWS) ** 0.5
