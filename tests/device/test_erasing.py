"""BatchRandomErasing: torchvision's results and distributions, for a box in each image of a batch."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from shardio.device import BatchRandomErasing
from shardio.device.mixing import PixelBox
from shardio.libraries import import_library
from tests.device.test_mixing import NUM_DRAWS, THRESHOLD, ks_distance, seeded

import_library("torchvision")
v2: Any = importlib.import_module("torchvision.transforms.v2")


def make_images(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 3, 24, 18, generator=seeded(0)).to(dtype)


@pytest.mark.parametrize("value", [0, 0.25, (0.1, -0.2, 3.7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_torchvisions(value: Any, dtype: torch.dtype) -> None:
    images, erasing, numbers = make_images(30, dtype), BatchRandomErasing(0.7, value=value), random.Random(0)
    boxes = [erasing.draw(numbers, 24, 18) for _ in images]
    assert {box is None for box in boxes} == {True, False}
    erased, labels = erasing.apply((images, "labels"), boxes, seeded(0))
    assert labels == "labels"
    fill = v2.RandomErasing(value=value).make_params([images[0]])["v"]
    for image, box, result in zip(images, boxes, erased, strict=True):
        expected = image if box is None else v2.functional.erase(image, *box, fill)
        assert torch.equal(result, expected)


def test_integers_are_erased_as_torchvision_erases_them() -> None:
    images = torch.randint(0, 256, (1, 3, 24, 18), dtype=torch.uint8)
    erased = BatchRandomErasing(value=117).apply(images, [PixelBox(3, 4, 10, 6)], seeded(0))
    assert torch.equal(erased[0], v2.functional.erase(images[0], 3, 4, 10, 6, torch.tensor([117])))


@pytest.mark.parametrize("scale", [(0.02, 0.33), (0.5, 1.0)])
def test_boxes_have_torchvisions_distribution(scale: tuple[float, float]) -> None:
    """With large boxes, many images stay as they are, because all tries fail."""
    torch.manual_seed(0)
    numbers, erasing = random.Random(0), BatchRandomErasing(1.0, scale, (0.2, 4.0))
    reference, image = v2.RandomErasing(1.0, scale, (0.2, 4.0)), [torch.empty(3, 24, 18)]
    drawn = [erasing.draw(numbers, 24, 18) for _ in range(NUM_DRAWS)]
    expected = [
        None if found["v"] is None else PixelBox(found["i"], found["j"], found["h"], found["w"])
        for found in (reference.make_params(image) for _ in range(NUM_DRAWS))
    ]
    boxes, references = ([[*(box or PixelBox(-1, -1, 0, 0))] for box in sample] for sample in (drawn, expected))
    for figure in range(4):
        one, other = ([box[figure] for box in sample] for sample in (boxes, references))
        assert ks_distance(one, other) < THRESHOLD, PixelBox._fields[figure]
    one, other = ([box[2] * box[3] for box in sample] for sample in (boxes, references))
    assert ks_distance(one, other) < THRESHOLD, "area"


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_the_probability_is_kept_for_each_image(p: float) -> None:
    images = torch.ones(2000, 1, 12, 12)
    erased = BatchRandomErasing(p)(images, generator=seeded(0))
    assert float((erased == 0).flatten(1).any(1).float().mean()) == pytest.approx(p, abs=0.035)
    assert bool((images == 1).all())


def test_noise_is_normal_and_stays_in_its_box() -> None:
    images = torch.full((40, 3, 40, 40), 100.0)
    erased = BatchRandomErasing(1.0, value="random")(images, generator=seeded(0))
    changed = erased != 100
    noise = np.sort(erased[changed].double().numpy())
    assert len(noise) > 10_000
    expected = torch.special.ndtr(torch.from_numpy(noise)).numpy()
    assert np.abs(expected - (np.arange(len(noise)) + 0.5) / len(noise)).max() < 1.95 / len(noise) ** 0.5
    for image in changed:
        rows, columns = image.any(2).any(0), image.any(1).any(0)
        assert torch.equal(image, (rows[:, None] & columns).expand(3, -1, -1)), "all channels of a box"


def test_images_at_the_start_do_not_depend_on_those_after_them() -> None:
    """So repeats at the end of a batch change nothing."""
    images, erasing = make_images(9), BatchRandomErasing(0.5)
    assert torch.equal(erasing(images, generator=seeded(4))[:5], erasing(images[:5], generator=seeded(4)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BatchRandomErasing(1.5), "p must be a probability from 0 to 1, got 1.5"),
        (lambda: BatchRandomErasing(scale=(0.5, 0.1)), "scale must be"),
        (lambda: BatchRandomErasing(scale=(0.5, 1.1)), "scale must be"),
        (lambda: BatchRandomErasing(ratio=(0, 1)), "ratio must be"),
        (lambda: BatchRandomErasing(value="noise"), "value must be a number, .* or 'random', got 'noise'"),  # type: ignore[arg-type]  # what is tested
        (lambda: BatchRandomErasing(value=()), "value must be a number"),
        (
            lambda: BatchRandomErasing(value=(1, 2))(make_images(1), generator=seeded(0)),
            r"value must be one number or 3, one per channel, got \(1.0, 2.0\)",
        ),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_noise_needs_floats() -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"value='random' needs images of floats, got torch.uint8"):
        BatchRandomErasing(value="random")(images, generator=seeded(0))
