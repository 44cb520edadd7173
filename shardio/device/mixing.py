"""Mixing: each image of a batch is combined with another one, and its label with that one's.

Names, arguments and distributions are those of torchvision.transforms.v2. So are the results, given the same
parameters. MixUp is from Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018), CutMix from Yun et al.,
"CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features" (2019).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardio.device.boxes import PixelBox
from shardio.device.generators import BatchTransform, call_transform, make_random
from shardio.device.labelled import LabelsGetter, find_images, find_labels, find_valid, replace_tensors
from shardio.values import check_optional_integer

Parameters = TypeVar("Parameters")


class _Mixing(ABC, Generic[Parameters]):
    """The base class of MixUp and CutMix, which draw the share of an image that is its own from Beta(alpha, alpha)."""

    def __init__(
        self, *, alpha: float = 1.0, num_classes: int | None = None, labels_getter: LabelsGetter = "default"
    ) -> None:
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha must be positive and finite, got {alpha}")
        if labels_getter != "default" and not callable(labels_getter):
            raise TypeError(f"labels_getter must be 'default' or a function, got {labels_getter!r}")
        self.alpha, self.labels_getter = float(alpha), labels_getter
        self.num_classes = check_optional_integer("num_classes", num_classes, at_least=1)

    def __call__(self, batch: Any, *, generator: torch.Generator) -> Any:
        """Return the mixed batch. The given batch does not change.

        Args:
            batch: A batch with images [N, C, H, W], and labels: int64 [N], or soft labels [N, ``num_classes``].
            generator: A generator of any device.
        """
        height, width = find_images(batch).shape[-2:]
        return self.apply(batch, self.draw(make_random(generator), height, width))

    def apply(self, batch: Any, parameters: Parameters) -> Any:
        """Return the batch, mixed with the parameters that :meth:`draw` returned."""
        images, labels = find_images(batch), find_labels(batch, self.labels_getter)
        soft_labels = self._soften(labels)
        if len(labels) != len(images):
            raise ValueError(f"a batch must have a label for each image, got {len(labels)} for {len(images)} images")
        rows = None if (valid := find_valid(batch)) is None else find_partners(valid)
        mixed, share = self.mix(images, rows, parameters)
        mixed_labels = _blend(soft_labels, rows, share)
        return replace_tensors(batch, (images, mixed), (labels, mixed_labels))

    @abstractmethod
    def draw(self, numbers: random.Random, height: int, width: int) -> Parameters:
        """Return random parameters for a batch of images of this size."""

    @abstractmethod
    def mix(
        self, images: torch.Tensor, rows: torch.Tensor | None, parameters: Parameters
    ) -> tuple[torch.Tensor, float]:
        """Return mixed images [N, C, H, W], and the share of each that is its own.

        ``rows`` are those of the partners, int64 [N]; None for the row before each.
        """

    def _draw_lambda(self, numbers: random.Random) -> float:
        return numbers.betavariate(self.alpha, self.alpha)

    def _soften(self, labels: torch.Tensor) -> torch.Tensor:
        """Return labels as floats [N, classes]."""
        if labels.ndim == 2:
            if self.num_classes not in (None, labels.shape[1]):
                raise ValueError(f"soft labels must have num_classes={self.num_classes} columns, got {labels.shape[1]}")
            return labels if labels.is_floating_point() else labels.float()
        if labels.ndim != 1 or labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be class numbers, int64 [N], or soft labels [N, classes], got {labels.dtype} "
                f"{list(labels.shape)}: convert them, or pass labels_getter to find others"
            )
        if self.num_classes is None:
            raise ValueError(f"labels [N] need a number of classes: pass num_classes to {type(self).__name__}")
        return nn.functional.one_hot(labels, self.num_classes).float()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha}, num_classes={self.num_classes})"


class MixUp(_Mixing[float]):
    """Blend each image of a batch with the one before it, and their labels.

    Labels become float [N, ``num_classes``]. Repeats that ``remainder="mask"`` marks are not blended into other images.
    Images must be floats.

    >>> batch = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    >>> images, labels = MixUp(alpha=0.2, num_classes=3)(batch, generator=torch.Generator())
    >>> labels.shape
    torch.Size([4, 3])

    Args:
        alpha: Each batch draws its lambda, the share of an image that is its own, from Beta(alpha, alpha).
        num_classes: The number of classes. It may be None if labels are soft.
        labels_getter: A function that returns the labels of a batch. By default, they are the second value, or what a
            mapping has under ``labels`` or another key that contains ``label``.
    """

    def draw(self, numbers: random.Random, height: int, width: int) -> float:
        return self._draw_lambda(numbers)

    def mix(self, images: torch.Tensor, rows: torch.Tensor | None, parameters: float) -> tuple[torch.Tensor, float]:
        if not images.is_floating_point():
            raise TypeError(
                f"MixUp needs images of floats, got {images.dtype}: pass normalize or dtype to DevicePrefetcher"
            )
        return _blend(images, rows, parameters), parameters


class CutMix(_Mixing[PixelBox]):
    """Replace a random box in each image of a batch with that of the image before it, and blend their labels.

    The box is the same for all images of a batch. Labels become float [N, ``num_classes``]. Repeats that
    ``remainder="mask"`` marks are not cut into other images.

    Args:
        alpha: Each batch draws its lambda, the planned share of an image outside the box, from Beta(alpha, alpha). At
            an edge, the box is smaller; labels have the shares of the real one.
        num_classes: The number of classes. It may be None if labels are soft.
        labels_getter: A function that returns the labels of a batch. By default, they are the second value, or what a
            mapping has under ``labels`` or another key that contains ``label``.
    """

    def draw(self, numbers: random.Random, height: int, width: int) -> PixelBox:
        half_side = 0.5 * math.sqrt(1.0 - self._draw_lambda(numbers))
        left, right = _draw_span(numbers, width, half_side)
        top, bottom = _draw_span(numbers, height, half_side)
        return PixelBox(top, left, bottom - top, right - left)

    def mix(self, images: torch.Tensor, rows: torch.Tensor | None, parameters: PixelBox) -> tuple[torch.Tensor, float]:
        box, (height, width) = parameters, images.shape[-2:]
        mixed = images.clone()
        box.of(mixed).copy_(_take_partners(box.of(images), rows))
        return mixed, 1.0 - box.width * box.height / (width * height)


class OneOf:
    """Apply one of several transforms of batches, chosen at random for each batch with equal probability.

    >>> transform = OneOf([MixUp(alpha=0.2, num_classes=1000), CutMix(num_classes=1000)])

    Args:
        transforms: Functions that take and return a batch. Those that have a parameter ``generator`` receive it.
    """

    def __init__(self, transforms: Sequence[BatchTransform]) -> None:
        if not transforms:
            raise ValueError("OneOf needs at least one transform, got none")
        self.transforms = list(transforms)

    def __call__(self, batch: Any, *, generator: torch.Generator) -> Any:
        """Return the transformed batch."""
        return call_transform(make_random(generator).choice(self.transforms), batch, generator)

    def __repr__(self) -> str:
        return f"OneOf({self.transforms})"


def find_partners(valid: torch.Tensor) -> torch.Tensor:
    """Return for each row the row before it that is valid, or the last one that is; anything if none is valid.

    Thus repeats are not mixed into other samples, and valid rows are mixed as if there were no repeats.

    Args:
        valid: bool [N], false for repeats.

    Returns:
        int64 [N]. It is computed on the device, because reading ``valid`` would wait for it.
    """
    rows = torch.arange(len(valid), device=valid.device)
    last_up_to = torch.where(valid, rows, -1).cummax(0).values
    last_before = last_up_to.roll(1)  # Row 0 gets the last one of all.
    return torch.where(last_before < 0, last_up_to[-1], last_before)


def _take_partners(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return a copy that has in each row of a tensor the row of its partner, by default the one before it."""
    if rows is not None:
        return tensor[rows]
    return torch.cat([tensor[-1:], tensor[:-1]])  # On CUDA, tensor.roll(1, 0) would lose the memory format.


def _blend(tensor: torch.Tensor, rows: torch.Tensor | None, share: float) -> torch.Tensor:
    """Return the weighted sum of each row and its partner's. Its steps round as torchvision's."""
    return _take_partners(tensor, rows).mul_(1.0 - share).add_(tensor.mul(share))


def _draw_span(numbers: random.Random, length: int, half_side: float) -> tuple[int, int]:
    """Return the start and the stop of a side of a box around a random center, without what is outside the image."""
    center, half = numbers.randrange(length), int(half_side * length)
    return max(center - half, 0), min(center + half, length)
