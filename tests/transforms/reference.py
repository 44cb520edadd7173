"""torchvision's published rules for the parameters of its transforms, in plain code for one image at a time."""

from __future__ import annotations

import math

import numpy as np

Box = tuple[int, int, int, int]
"""Top, left, height and width."""

Bounds = tuple[float, float]


def draw_crop(height: int, width: int, scale: Bounds, ratio: Bounds, random: np.random.Generator) -> Box | None:
    """Draw a box as RandomResizedCrop does, or return None if none of ten tries fits."""
    for _ in range(10):
        area = height * width * random.uniform(*scale)
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        crop_width = round(math.sqrt(area * aspect))
        crop_height = round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(random.integers(0, height - crop_height + 1))
            left = int(random.integers(0, width - crop_width + 1))
            return top, left, crop_height, crop_width
    return None


def central_crop(height: int, width: int, ratio: Bounds) -> Box:
    """Return the box that RandomResizedCrop falls back to: at least one pixel, where torchvision fails at none."""
    crop_height, crop_width = height, width
    if width / height < ratio[0]:
        crop_height = max(round(width / ratio[0]), 1)
    elif width / height > ratio[1]:
        crop_width = max(round(height * ratio[1]), 1)
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def resized_size(height: int, width: int, size: int) -> tuple[int, int]:
    """Return the height and width that Resize gives for one number."""
    if width <= height:
        return int(size * height / width), size
    return size, int(size * width / height)


def center_crop(height: int, width: int, size: tuple[int, int]) -> tuple[Box, Box]:
    """Return how CenterCrop pads an image (left, top, right, bottom) and then crops it."""
    missing_rows, missing_columns = max(size[0] - height, 0), max(size[1] - width, 0)
    padding = missing_columns // 2, missing_rows // 2, (missing_columns + 1) // 2, (missing_rows + 1) // 2
    top = round((height + missing_rows - size[0]) / 2)
    left = round((width + missing_columns - size[1]) / 2)
    return padding, (top, left, size[0], size[1])
