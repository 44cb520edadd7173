"""Transforms in plain code: one after another, on whole arrays, with numpy, OpenCV and Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shardio.images import CropPlan, Resampling, crop_plan
from shardio.images.crop_plan import is_opencv_equal
from shardio.images.jpeg import Box
from shardio.order import derive_rng_key
from shardio.transforms import (
    CenterCrop,
    CornerCrop,
    Geometry,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from shardio.transforms.geometry import Interpolation, PaddingMode
from tests.images.pictures import Array


def crop(image: NDArray[Any], box: Box, mode: Any = "constant", color: float = 0) -> NDArray[Any]:
    height, width = image.shape[:2]
    above, left = max(-box.top, 0), max(-box.left, 0)
    below, right = max(box.top + box.height - height, 0), max(box.left + box.width - width, 0)
    constant = {"constant_values": color} if mode == "constant" else {}
    padded = np.pad(image, ((above, below), (left, right), (0, 0)), mode, **constant)
    top, first = box.top + above, box.left + left
    return padded[top : top + box.height, first : first + box.width].copy()


def resize(image: Array, height: int, width: int, *, resampling: Resampling) -> Array:
    """Resize an array with OpenCV or Pillow, horizontally first, as all versions of Pillow before 13 do.

    OpenCV interpolates only between the nearest four pixels. If both sides are at least halved, Pillow averages pixels.
    """
    if image.shape[0] >= 2 * height and image.shape[1] >= 2 * width and resampling == "bilinear":
        resampling = "antialiased bilinear"
    if resampling not in ("bilinear", "plain bilinear"):
        kind = Image.Resampling[resampling.removeprefix("antialiased ").upper()]
        return np.asarray(Image.fromarray(image).resize((width, len(image)), kind).resize((width, height), kind))
    return resize_bilinear(image, height, width)


def resize_bilinear(image: Array, height: int, width: int) -> Array:
    """Resize an array with OpenCV or, if its build rounds differently, with the code that test_bilinear.py tests."""
    if not is_opencv_equal():
        return crop_plan.resize_bilinear(image, height, width)
    return np.asarray(cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR), dtype=np.uint8)


def render(image: Array, plan: CropPlan, row: int) -> Array:
    """Crop, resize, crop again and perhaps mirror an array, as a row of a plan specifies."""
    part = crop(image, Box(*plan.box[row].tolist()))
    resized = resize(part, *plan.size[row].tolist(), resampling=plan.resampling)
    window = crop(resized, Box(*plan.window[row].tolist()))
    return window[:, ::-1] if plan.flip[row] else window


def _resampling(step: RandomResizedCrop | Resize) -> Resampling:
    if not step.antialias:
        return "bilinear"
    return "antialiased bilinear" if step.interpolation == "bilinear" else "antialiased bicubic"


def transform_one(step: Geometry, image: Array, parameters: Any) -> Array:
    if isinstance(step, RandomResizedCrop):
        return resize(crop(image, Box(*parameters.tolist())), *step.size, resampling=_resampling(step))
    if isinstance(step, Resize):
        return resize(image, *parameters.tolist(), resampling=_resampling(step))
    if isinstance(step, Pad | RandomCrop):
        assert isinstance(step.fill, int | float)
        return crop(image, Box(*parameters.tolist()), step.padding_mode, step.fill)
    if isinstance(step, CenterCrop | CornerCrop):
        return crop(image, Box(*parameters.tolist()))
    if isinstance(step, RandomHorizontalFlip):
        return image[:, ::-1].copy() if parameters else image
    assert isinstance(step, RandomVerticalFlip)
    return image[::-1].copy() if parameters else image


def transform_all(steps: Sequence[Geometry], images: Sequence[Array], rng_keys: NDArray[np.uint64]) -> list[Array]:
    transformed = list(images)
    for index, step in enumerate(steps):
        sizes = np.array([image.shape[:2] for image in transformed], dtype=np.int64).reshape(-1, 2)
        parameters = step.draw(sizes, derive_rng_key(rng_keys, np.array([index], dtype=np.uint64)))
        transformed = [transform_one(step, image, row) for image, row in zip(transformed, parameters, strict=True)]
    return transformed


def draw_steps(random: np.random.Generator, smallest: int, largest: int) -> list[Geometry]:
    """Draw one to five transforms in random order; the sides of their outputs are from ``smallest`` to ``largest``."""

    def side() -> int:
        return int(random.integers(smallest, largest + 1))

    steps: list[Geometry] = []
    for _ in range(random.integers(1, 6)):
        antialias = bool(random.random() < 0.3)
        interpolation: Interpolation = "bicubic" if antialias and random.random() < 0.5 else "bilinear"
        size = side() if random.random() < 0.5 else (side(), side())
        steps.append(
            [
                RandomResizedCrop(size, scale=(0.2, 1.0), interpolation=interpolation, antialias=antialias),
                Resize(size, interpolation=interpolation, antialias=antialias),
                CenterCrop(size),
                RandomHorizontalFlip(0.5),
                RandomVerticalFlip(0.5),
                _draw_padding(random, size),
            ][random.integers(6)]
        )
    return steps


def _draw_padding(random: np.random.Generator, size: int | tuple[int, int]) -> Geometry:
    modes: list[PaddingMode] = ["constant", "edge", "reflect", "symmetric"]
    mode, fill = modes[random.integers(4)] if random.random() < 0.5 else "constant", int(random.choice([0, 99]))
    padding = random.integers(0, 5, random.choice([1, 2, 4])).tolist()
    return RandomCrop(size, padding, pad_if_needed=True, fill=fill, padding_mode=mode)
