"""Erasing: a random box of each image of a batch is filled.

Arguments and distributions are those of torchvision.transforms.v2. So are the results, given the same parameters. The
method is from Zhong et al., "Random Erasing Data Augmentation" (2020).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, Literal

import torch

from shardio.device.boxes import PixelBox
from shardio.device.generators import make_random
from shardio.device.labelled import find_images, replace_tensors

NUM_TRIES = 10
"""How many boxes are tried before an image is left alone, as in torchvision."""


class BatchRandomErasing:
    """Fill a random box in each image of a batch, with probability ``p``. Each image has a box of its own.

    >>> erased = BatchRandomErasing(p=1.0)(torch.ones(4, 3, 32, 32), generator=torch.Generator())
    >>> [bool((image == 0).any()) for image in erased]
    [True, True, True, True]

    Args:
        p: The probability that an image is changed.
        scale: The lower and upper bounds of the box's share of the image's area.
        ratio: The lower and upper bounds of the box's height / width, drawn uniformly on a logarithmic scale.
        value: The value of the box's pixels: a number, one number for each channel, or "random" for noise from the
            normal distribution. It replaces pixels that are already normalised, as in torchvision's recipes.
    """

    def __init__(
        self,
        p: float = 0.5,
        scale: Sequence[float] = (0.02, 0.33),
        ratio: Sequence[float] = (0.3, 3.3),
        value: float | Sequence[float] | Literal["random"] = 0.0,
    ) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"p must be a probability from 0 to 1, got {p}")
        if not (len(scale) == 2 and 0 <= scale[0] <= scale[1] <= 1):
            raise ValueError(f"scale must be (low, high) with 0 <= low <= high <= 1, got {scale!r}")
        if not (len(ratio) == 2 and 0 < ratio[0] <= ratio[1] < math.inf):
            raise ValueError(f"ratio must be (low, high) with 0 < low <= high, got {ratio!r}")
        self.p, self.scale, self.ratio, self.value = p, scale, ratio, _check_value(value)

    def __call__(self, batch: Any, *, generator: torch.Generator) -> Any:
        """Return the batch with boxes erased. The given batch does not change.

        Args:
            batch: A batch with images [N, C, H, W].
            generator: A generator of the images' device.
        """
        num_images, _, height, width = find_images(batch).shape
        numbers = make_random(generator)
        return self.apply(batch, [self.draw(numbers, height, width) for _ in range(num_images)], generator)

    def apply(self, batch: Any, boxes: Sequence[PixelBox | None], generator: torch.Generator) -> Any:
        """Return the batch with a box erased in each image, except where it is None."""
        images = find_images(batch)
        self._check_images(images)
        erased = images.clone()
        for image, box in zip(erased, boxes, strict=True):
            if box is not None:
                self._fill(box.of(image), generator)
        return replace_tensors(batch, (images, erased))

    def draw(self, numbers: random.Random, height: int, width: int) -> PixelBox | None:
        """Return a random box in an image of this size, or None to leave the image alone."""
        if numbers.random() >= self.p:
            return None
        for _ in range(NUM_TRIES):
            area = height * width * numbers.uniform(*self.scale)
            aspect = math.exp(numbers.uniform(*map(math.log, self.ratio)))
            rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if rows < height and columns < width:
                return PixelBox(
                    numbers.randrange(height - rows + 1), numbers.randrange(width - columns + 1), rows, columns
                )
        return None

    def _fill(self, pixels: torch.Tensor, generator: torch.Generator) -> None:
        """Fill the pixels of a box, [C, height, width]. Numbers are passed to the device without waiting for it."""
        if self.value == "random":
            pixels.normal_(generator=generator)
            return
        for channels, value in zip(pixels.chunk(len(self.value)), self.value, strict=True):
            channels.fill_(value)

    def _check_images(self, images: torch.Tensor) -> None:
        if self.value == "random" and not images.is_floating_point():
            raise TypeError(
                f"BatchRandomErasing with value='random' needs images of floats, got {images.dtype}: pass normalize or "
                "dtype to DevicePrefetcher"
            )
        if self.value != "random" and len(self.value) not in (1, images.shape[1]):
            raise ValueError(f"value must be one number or {images.shape[1]}, one per channel, got {self.value}")

    def __repr__(self) -> str:
        return f"BatchRandomErasing(p={self.p}, scale={self.scale}, ratio={self.ratio}, value={self.value!r})"


def _check_value(value: object) -> tuple[float, ...] | Literal["random"]:
    """Return numbers as a tuple, or "random"."""
    if value == "random":
        return "random"
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not values or not all(isinstance(each, int | float) for each in values):
        raise ValueError(f"value must be a number, one number for each channel, or 'random', got {value!r}")
    return tuple(map(float, values))
