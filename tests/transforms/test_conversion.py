"""ToDtype and Normalize: torchvision's floating-point images, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio import DataLoader, ShardDataset
from shardio.libraries import import_library
from shardio.transforms import CenterCrop, ColorJitter, Compose, Normalize, ToDtype
from tests.transforms.inputs import make_noise

import_library("torchvision")
v2 = pytest.importorskip("torchvision.transforms.v2")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(1, 1), (3, 3), (7, 33), (64, 50)]


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def _functions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr("shardio.images.editing.find_functions", lambda: None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("begin", [[ToDtype("float32", scale=True)], []], ids=["ToDtype", "pixels"])
def test_normalised_images_are_torchvisions(size: tuple[int, int], begin: list[Any]) -> None:
    image = make_noise(*size)
    theirs = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    normalized = Compose([*begin, Normalize(MEAN, STD)])(image)
    assert normalized.dtype == np.float32
    np.testing.assert_array_equal(normalized, theirs(image).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, np.float32, "float32"])
def test_scaled_images_are_torchvisions(dtype: Any) -> None:
    image = make_noise(40, 30)
    expected = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])(image)
    np.testing.assert_array_equal(ToDtype(dtype, scale=True)(image), expected.numpy())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_tensors(packed: Path, num_workers: int) -> None:
    def load(transform: Any) -> list[Any]:
        dataset = ShardDataset(packed, fields=("image", "key"), transform=transform)
        loader = DataLoader(dataset, 4, num_workers=num_workers)
        assert not loader.calls_dataset, "shardio's own executors make the batches"
        return list(loader)

    steps = [CenterCrop(24), ColorJitter(0.4)]
    plain, normalized = load(Compose(steps)), load(Compose([*steps, Normalize(MEAN, STD)]))
    for (pixels, keys), (images, same_keys) in zip(plain, normalized, strict=True):
        expected = v2.functional.normalize(pixels.float() * (1 / 255), MEAN, STD)
        assert list(keys) == list(same_keys)
        assert images.dtype == torch.float32
        assert torch.equal(images, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ToDtype(torch.float32), r"write ToDtype\(torch.float32, scale=True\)"),
        (lambda: ToDtype(torch.float16, scale=True), r"DevicePrefetcher\(dtype=...\)"),
        (lambda: Normalize(MEAN, (1, 2)), "must have three numbers"),
        (lambda: Normalize(MEAN, (1, 0, 1)), "std must be positive"),
    ],
)
def test_bad_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_other_images_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Normalize.* takes uint8 \[height, width, 3\]"):
        Normalize(MEAN, STD)(np.zeros((4, 5, 3)))
