"""Crops for peers that leave decoding to their users: with OpenCV, simplejpeg, or Pillow as in torchvision."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from benchmarks.loaders.job import RATIO, SCALE, SHORTER_SIDE, TARGET, Crop

Pixels = NDArray[np.uint8]
"""uint8 [height, width, 3]."""

FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION


def draw_box(height: int, width: int) -> tuple[int, int, int, int]:
    """Return a random crop by torchvision's published algorithm: top, left, height, width."""
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(10):
        area = height * width * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(low, high))
        crop_width, crop_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top, left = random.randint(0, height - crop_height), random.randint(0, width - crop_width)
            return top, left, crop_height, crop_width
    crop_width = min(width, round(height * RATIO[1]))
    crop_height = min(height, round(width / RATIO[0]))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


Use = Callable[[bytes, Crop, Pixels], None]
"""A function that decodes a JPEG and writes its crop into a row of a batch, uint8 [224, 224, 3]."""


def use_opencv(content: bytes, crop: Crop, row: Pixels) -> None:
    """Decode and resize with OpenCV."""
    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), FLAGS)
    assert pixels is not None, "all images of the benchmark can be read"
    resize(np.asarray(pixels, np.uint8), crop, row)


def use_simplejpeg(content: bytes, crop: Crop, row: Pixels) -> None:
    """Decode with simplejpeg, a thin layer over libjpeg-turbo, and resize with OpenCV."""
    resize(simplejpeg.decode_jpeg(content), crop, row)


def resize(pixels: Pixels, crop: Crop, row: Pixels) -> None:
    """Write a crop of an image, uint8 [height, width, 3], into a row of a batch."""
    height, width = pixels.shape[:2]
    if crop == "train":
        top, left, crop_height, crop_width = draw_box(height, width)
        part = pixels[top : top + crop_height, left : left + crop_width]
        if random.random() < 0.5:
            cv2.flip(cv2.resize(part, (TARGET, TARGET)), 1, dst=row)
        else:
            cv2.resize(part, (TARGET, TARGET), dst=row)
        return
    height, width = _evaluation_size(height, width)
    top, left = round((height - TARGET) / 2), round((width - TARGET) / 2)
    row[...] = cv2.resize(pixels, (width, height))[top : top + TARGET, left : left + TARGET]


def use_pillow(content: bytes, crop: Crop, row: Pixels) -> None:
    """Decode and resize with Pillow, which always antialiases, as torchvision does with Pillow images."""
    import io

    import PIL.Image

    with PIL.Image.open(io.BytesIO(content)) as file:
        image = file.convert("RGB")
    bilinear = PIL.Image.Resampling.BILINEAR
    if crop == "train":
        top, left, height, width = draw_box(image.height, image.width)
        image = image.resize((TARGET, TARGET), bilinear, box=(left, top, left + width, top + height))
        if random.random() < 0.5:
            image = image.transpose(PIL.Image.Transpose.FLIP_LEFT_RIGHT)
    else:
        height, width = _evaluation_size(image.height, image.width)
        top, left = round((height - TARGET) / 2), round((width - TARGET) / 2)
        image = image.resize((width, height), bilinear).crop((left, top, left + TARGET, top + TARGET))
    row[...] = np.asarray(image)


def make_batch(contents: Sequence[bytes], crop: Crop, use: Use) -> NDArray[np.uint8]:
    """Return the crops of some JPEGs, uint8 [n, 224, 224, 3]."""
    images = np.empty((len(contents), TARGET, TARGET, 3), np.uint8)
    for content, row in zip(contents, images, strict=True):
        use(content, crop, row)
    return images


def use_one_thread(_: int = 0) -> None:
    """Limit OpenCV to one thread in this process, because images are already decoded in parallel."""
    cv2.setNumThreads(0)


def _evaluation_size(height: int, width: int) -> tuple[int, int]:
    shorter = min(height, width)
    return SHORTER_SIDE * height // shorter, SHORTER_SIDE * width // shorter
