"""Mix images of a batch with each other, or erase boxes in them, on the device.

Names, arguments, distributions and results for given parameters are as in torchvision.transforms.v2. MixUp is from
Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018). CutMix is from Yun et al., "CutMix: Regularization
Strategy to Train Strong Classifiers with Localizable Features" (2019). Random erasing is from Zhong et al., "Random
Erasing Data Augmentation" (2020).
"""

from __future__ import annotations

import inspect
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import nn

from shardio.device.streams import map_tensors
from shardio.values import check_optional_integer, count


class PixelBox(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int

    def of(self, images: torch.Tensor) -> torch.Tensor:
        """Return a view of the part of images [..., H, W] that is in the box."""
        return images[..., self.top : self.top + self.height, self.left : self.left + self.width]


BatchTransform = Callable[..., Any]
"""A function that takes and returns a batch. If it has a parameter ``generator``, it receives a torch.Generator."""

NUM_TRIES = 10
"""The number of boxes to try before an image is left unchanged, as in torchvision."""

LabelsGetter = Callable[[Any], Any] | Literal["default"]
"""A function that returns the labels of a batch. "default" follows the rule of :func:`find_labels`."""


def takes_generator(transform: BatchTransform) -> bool:
    """Return whether a transform has a parameter ``generator``."""
    if isinstance(transform, torch.nn.Module):
        transform = transform.forward  # The signature of a module's __call__ lacks forward's parameters.
    try:
        return "generator" in inspect.signature(transform).parameters
    except ValueError:  # Some C functions have no signature.
        return False


def call_transform(transform: BatchTransform, batch: Any, generator: torch.Generator | None) -> Any:
    """Return the transformed batch. The transform receives the generator if it accepts one."""
    return transform(batch, generator=generator) if takes_generator(transform) else transform(batch)


def make_random(generator: torch.Generator) -> random.Random:
    """Return a random number generator on the CPU, seeded by a draw from a torch generator on any device.

    This does not wait for the device, because the state of a torch generator is in host memory. Numbers drawn on the
    device could be read only after all queued work had finished.
    """
    numbers = random.Random(generator.get_state().numpy().tobytes())
    torch.empty(1, device=generator.device).uniform_(generator=generator)  # Advance the torch generator.
    return numbers


def find_images(batch: Any) -> torch.Tensor:
    """Return the images of a batch: its only tensor [N, C, H, W].

    Raises:
        ValueError: If the batch has no such tensor, or more than one.
    """
    found = list[torch.Tensor]()

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 4:
            found.append(tensor)
        return tensor

    map_tensors(batch, collect)
    if len(found) != 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in found) or "none"
        raise ValueError(
            f"a batch must have exactly one tensor of images [N, C, H, W], got {shapes}: for other batches, "
            "write a function that passes only images and labels to this transform"
        )
    return found[0]


def find_labels(batch: Any, getter: LabelsGetter) -> torch.Tensor:
    """Return the labels of a batch.

    By default, the labels are the second value of a tuple or a list. If the batch or this value is a mapping, its key
    ``labels`` holds the labels; without this key, the first key that contains ``label``, regardless of case, holds
    them. This is torchvision's rule.

    Raises:
        TypeError: If the labels are not a tensor, or are not found.
    """
    labels = _find_by_default(batch) if getter == "default" else getter(batch)
    if not isinstance(labels, torch.Tensor):
        raise TypeError(
            f"the labels of a batch must be a tensor, got {type(labels).__name__}: pass images and labels, a mapping "
            "with the key 'labels', or labels_getter"
        )
    return labels


def find_valid(batch: Any) -> torch.Tensor | None:
    """Return the marks that ``remainder="mask"`` adds, bool [N], false for repeats; None if the batch has no marks."""
    if isinstance(batch, Mapping):
        valid = batch.get("valid")
    else:
        valid = batch[-1] if isinstance(batch, tuple | list) and batch else None
    is_mask = isinstance(valid, torch.Tensor) and valid.dtype == torch.bool and valid.ndim == 1
    return valid if is_mask else None


def replace_tensors(batch: Any, *replacements: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Return a batch in which tensors, given as pairs (old, new), are replaced. The given batch is not modified."""
    new_by_id = {id(old): new for old, new in replacements}
    return map_tensors(batch, lambda tensor: new_by_id.get(id(tensor), tensor))


def _find_by_default(batch: Any) -> Any:
    value = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else batch
    if not isinstance(value, Mapping):
        return None if value is batch else value
    keys = [key for key in value if isinstance(key, str) and "label" in key.lower()]
    exact = [key for key in keys if key.lower() == "labels"]
    return value[(exact or keys)[0]] if keys else None


class BatchRandomErasing:
    """Fill a random box in each image of a batch, with probability ``p`` for each image. Each image has its own box.

    >>> erased = BatchRandomErasing(p=1.0)(torch.ones(4, 3, 32, 32), generator=torch.Generator())
    >>> [bool((image == 0).any()) for image in erased]
    [True, True, True, True]

    Args:
        p: The probability that an image is changed.
        scale: The lower and upper bounds of the box's share of the image's area.
        ratio: The lower and upper bounds of the box's height / width, drawn uniformly on a logarithmic scale.
        value: The value of the box's pixels: a number, one number for each channel, or "random" for noise from the
            normal distribution. The value replaces pixels that are already normalized, as in torchvision's recipes.
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
        """Return the batch with boxes erased. The given batch is not modified.

        Args:
            batch: A batch with images [N, C, H, W].
            generator: A generator on the images' device.
        """
        num_images, _, height, width = find_images(batch).shape
        numbers = make_random(generator)
        return self.apply(batch, [self.draw(numbers, height, width) for _ in range(num_images)], generator)

    def apply(self, batch: Any, boxes: Sequence[PixelBox | None], generator: torch.Generator) -> Any:
        """Return the batch with the boxes erased. None leaves an image unchanged."""
        images = find_images(batch)
        self._check_images(images)
        erased = images.clone()
        for image, box in zip(erased, boxes, strict=True):
            if box is not None:
                self._fill(box.of(image), generator)
        return replace_tensors(batch, (images, erased))

    def draw(self, numbers: random.Random, height: int, width: int) -> PixelBox | None:
        """Return a random box in an image of this size, or None to leave the image unchanged."""
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
        """Fill the pixels of a box, [C, height, width], without waiting for the device."""
        if self.value == "random":
            pixels.normal_(generator=generator)
            return
        for channels, value in zip(pixels.chunk(len(self.value)), self.value, strict=True):
            channels.fill_(value)

    def _check_images(self, images: torch.Tensor) -> None:
        if self.value == "random" and not images.is_floating_point():
            raise TypeError(
                f"BatchRandomErasing with value='random' needs floating-point images, got {images.dtype}: pass "
                "normalize or dtype to DevicePrefetcher"
            )
        if self.value != "random" and len(self.value) not in (1, images.shape[1]):
            raise ValueError(f"value must be one number or {images.shape[1]}, one per channel, got {self.value}")

    def __repr__(self) -> str:
        return f"BatchRandomErasing(p={self.p}, scale={self.scale}, ratio={self.ratio}, value={self.value!r})"


def _check_value(value: object) -> tuple[float, ...] | Literal["random"]:
    if value == "random":
        return "random"
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    if not values or not all(isinstance(each, int | float) for each in values):
        raise ValueError(f"value must be a number, one number for each channel, or 'random', got {value!r}")
    return tuple(map(float, values))


Parameters = TypeVar("Parameters")


class _Mixing(ABC, Generic[Parameters]):
    """A transform that mixes each image with a partner, in a proportion drawn from Beta(alpha, alpha)."""

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
        """Return the mixed batch. The given batch is not modified.

        Args:
            batch: A batch with images [N, C, H, W], and labels: int64 [N], or soft labels [N, ``num_classes``].
            generator: A generator on any device.
        """
        height, width = find_images(batch).shape[-2:]
        return self.apply(batch, self.draw(make_random(generator), height, width))

    def apply(self, batch: Any, parameters: Parameters) -> Any:
        """Mix the batch, using the parameters that :meth:`draw` returned, and return it."""
        images, labels = find_images(batch), find_labels(batch, self.labels_getter)
        soft_labels = self._soften(labels)
        if len(labels) != len(images):
            raise ValueError(
                f"a batch must have a label for each image, got {len(labels)} for {count(len(images), 'image')}"
            )
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
        """Return mixed images [N, C, H, W], and the weight of each image's own pixels.

        ``rows`` are the rows of the partners, int64 [N]; if None, the partner of each row is the row before it.
        """

    def _draw_lambda(self, numbers: random.Random) -> float:
        return numbers.betavariate(self.alpha, self.alpha)

    def _soften(self, labels: torch.Tensor) -> torch.Tensor:
        if labels.ndim == 2:
            if self.num_classes not in (None, labels.shape[1]):
                raise ValueError(f"soft labels must have num_classes={self.num_classes} columns, got {labels.shape[1]}")
            return labels if labels.is_floating_point() else labels.float()
        if labels.ndim != 1 or labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be class numbers, int64 [N], or soft labels [N, classes], got {labels.dtype} "
                f"{list(labels.shape)}: convert them, or pass a labels_getter that returns such labels"
            )
        if self.num_classes is None:
            raise ValueError(f"labels [N] need a number of classes: pass num_classes to {type(self).__name__}")
        return nn.functional.one_hot(labels, self.num_classes).float()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(alpha={self.alpha}, num_classes={self.num_classes})"


class MixUp(_Mixing[float]):
    """Blend each image of a batch with the image before it, and blend their labels.

    Labels become float [N, ``num_classes``]. Repeats that ``remainder="mask"`` marks are not blended into other images.
    Images must be floats.

    >>> batch = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    >>> images, labels = MixUp(alpha=0.2, num_classes=3)(batch, generator=torch.Generator())
    >>> labels.shape
    torch.Size([4, 3])

    Args:
        alpha: The parameter of Beta(alpha, alpha), from which lambda, the weight of an image's own pixels, is
            drawn for each batch.
        num_classes: The number of classes. None is allowed if labels are soft.
        labels_getter: A function that returns the labels of a batch. By default, the labels are the second value
            or, in a mapping, the value under ``labels`` or another key that contains ``label``.
    """

    def draw(self, numbers: random.Random, height: int, width: int) -> float:
        return self._draw_lambda(numbers)

    def mix(self, images: torch.Tensor, rows: torch.Tensor | None, parameters: float) -> tuple[torch.Tensor, float]:
        if not images.is_floating_point():
            raise TypeError(
                f"MixUp needs floating-point images, got {images.dtype}: pass normalize or dtype to DevicePrefetcher"
            )
        return _blend(images, rows, parameters), parameters


class CutMix(_Mixing[PixelBox]):
    """Replace a random box in each image of a batch with the same box of the image before it, and blend their labels.

    The box is the same for all images of a batch. Labels become float [N, ``num_classes``]. Repeats that
    ``remainder="mask"`` marks are not pasted into other images.

    Args:
        alpha: The parameter of Beta(alpha, alpha), from which lambda, the nominal share of an image outside the
            box, is drawn for each batch. At an edge, the box is clipped; the labels reflect the box's actual area.
        num_classes: The number of classes. None is allowed if labels are soft.
        labels_getter: A function that returns the labels of a batch. By default, the labels are the second value
            or, in a mapping, the value under ``labels`` or another key that contains ``label``.
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
    """Apply one of several batch transforms, chosen at random for each batch with equal probability.

    >>> transform = OneOf([MixUp(alpha=0.2, num_classes=1000), CutMix(num_classes=1000)])

    Args:
        transforms: Functions that take and return a batch. Functions with a parameter ``generator`` receive a
            torch.Generator.
    """

    def __init__(self, transforms: Sequence[BatchTransform]) -> None:
        if not transforms:
            raise ValueError("OneOf needs at least one transform, got none")
        self.transforms = list(transforms)

    def __call__(self, batch: Any, *, generator: torch.Generator) -> Any:
        return call_transform(make_random(generator).choice(self.transforms), batch, generator)

    def __repr__(self) -> str:
        return f"OneOf({self.transforms})"


def find_partners(valid: torch.Tensor) -> torch.Tensor:
    """Return a valid row for each row: the nearest valid row before it or, if there is none, the last valid row.

    If no row is valid, return arbitrary rows. Repeats are therefore not mixed into other samples, and valid rows are
    mixed as if there were no repeats.

    Args:
        valid: bool [N], false for repeats.

    Returns:
        int64 [N]. The result is computed on the device, because reading ``valid`` would wait for the device.
    """
    rows = torch.arange(len(valid), device=valid.device)
    last_up_to = torch.where(valid, rows, -1).cummax(0).values
    last_before = last_up_to.roll(1)  # Row 0 gets the last valid row.
    return torch.where(last_before < 0, last_up_to[-1], last_before)


def _take_partners(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return a copy of a tensor with each row replaced by its partner, by default the row before it."""
    if rows is not None:
        return tensor[rows]
    return torch.cat([tensor[-1:], tensor[:-1]])  # On CUDA, tensor.roll(1, 0) would lose the memory format.


def _blend(tensor: torch.Tensor, rows: torch.Tensor | None, share: float) -> torch.Tensor:
    """Return the weighted sum of each row and its partner. The steps are rounded as in torchvision."""
    return _take_partners(tensor, rows).mul_(1.0 - share).add_(tensor.mul(share))


def _draw_span(numbers: random.Random, length: int, half_side: float) -> tuple[int, int]:
    """Return the start and stop of one side of a box around a random center, clipped to the image."""
    center, half = numbers.randrange(length), int(half_side * length)
    return max(center - half, 0), min(center + half, length)
