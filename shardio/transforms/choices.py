"""Transforms that apply some of others: at random, one of them, or all in random order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import Operations, Sizes, make_operations
from shardio.images.kernel.compiled.operation_records import NONE
from shardio.order import Words, derive_rng_key
from shardio.transforms.compose import Combination, inner_steps
from shardio.transforms.drawing import check_probability, draw_chance, draw_units
from shardio.transforms.pixel_transform import PixelTransform


class Choice(Combination, ABC):
    """The base class of transforms that choose for each image which of their transforms to apply.

    If all of these are shardio's and keep an image's size, they are applied in one compiled call. Otherwise, images are
    decoded as a whole first.

    Args:
        transforms: What to choose from: shardio's transforms, a :class:`Compose`, or any other callables.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__(transforms)
        if not self.transforms:
            raise ValueError(f"{type(self).__name__} needs at least one transform")

    @abstractmethod
    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        """Return the numbers of the transforms to apply to n images, in order, int64 [n, k]; -1 for none."""


class RandomApply(Choice):
    """Apply all of the transforms, in order, with probability ``p``.

    Args:
        transforms: The transforms.
        p: The probability.

    Example:
        >>> from shardio.transforms import ColorJitter, RandomApply
        >>> transform = RandomApply([ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8)
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]], p: float = 0.5) -> None:
        super().__init__(transforms)
        self.p = check_probability(p)

    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        numbers = np.arange(len(self.transforms))
        return np.where(draw_chance(rng_keys, self.p)[:, None], numbers, -1)

    def __repr__(self) -> str:
        return f"RandomApply({self.transforms}, p={self.p})"


class RandomChoice(Choice):
    """Apply one of the transforms.

    Args:
        transforms: The transforms.
        p: How likely each one is; these numbers need not add up to 1. By default, all are equally likely.
    """

    def __init__(self, transforms: Sequence[Callable[[Any], Any]], p: Sequence[float] | None = None) -> None:
        super().__init__(transforms)
        if p is not None and len(p) != len(self.transforms):
            raise ValueError(f"p must have one number for each of {len(self.transforms)} transforms, got {p!r}")
        weights = np.ones(len(self.transforms)) if p is None else np.array(p, dtype=np.float64)
        if not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
            raise ValueError(f"p must have numbers that are not negative, and one that is positive, got {p!r}")
        self.p = (weights / weights.sum()).tolist()

    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        bounds = np.cumsum(self.p)
        # The sum of all may be a little less than 1: the last one with a weight is chosen then.
        last = int(np.flatnonzero(self.p)[-1])
        return np.minimum(np.searchsorted(bounds, draw_units(rng_keys, 1), side="right"), last)

    def __repr__(self) -> str:
        return f"RandomChoice({self.transforms}, p={self.p})"


class RandomOrder(Choice):
    """Apply all of the transforms, in random order."""

    def choose(self, rng_keys: Words) -> NDArray[np.int64]:
        return np.argsort(draw_units(rng_keys, len(self.transforms)), axis=1)


CHOICES: frozenset[type] = frozenset({RandomApply, RandomChoice, RandomOrder})
"""The transforms of this module."""


def keys_of_inner(rng_keys: Words, number: int) -> Words:
    """Return the rng keys, uint64 [n], of one of a transform's inner transforms."""
    return derive_rng_key(rng_keys, np.array([number], dtype=np.uint64))


def parts_of(transform: Any) -> Sequence[Any] | None:
    """Return the transforms in a choice or a sequence; None for a single transform."""
    return transform.transforms if isinstance(transform, Choice) else inner_steps(transform)


def consists_of_operations(transform: Any) -> bool:
    """Return whether a transform consists only of shardio's that draw operations on pixels."""
    if (parts := parts_of(transform)) is not None:
        return all(map(consists_of_operations, parts))
    return isinstance(transform, PixelTransform) and transform.is_planned


def draw_operations(transform: Any, sizes: Sizes, rng_keys: Words) -> Operations:
    """Draw the operations on n images, OPERATION [n, k].

    Args:
        transform: A transform for which :func:`consists_of_operations` is true.
        sizes: int64 [n, 2], the images' heights and widths.
        rng_keys: uint64 [n].
    """
    if isinstance(transform, PixelTransform):
        operations: Operations = transform.draw(sizes, rng_keys)
        return operations
    parts = parts_of(transform) or []
    drawn = [draw_operations(each, sizes, keys_of_inner(rng_keys, i)) for i, each in enumerate(parts)]
    nothing = make_operations(len(sizes), NONE)
    if not isinstance(transform, Choice):
        return np.concatenate([nothing[:, :0], *drawn], axis=1)
    length = max(operations.shape[1] for operations in drawn)
    # [n, number of the transform, operation]; the last transform does nothing, so that -1 means none.
    choices = np.stack([_lengthen(each, length) for each in (*drawn, nothing)], axis=1)
    rows = np.arange(len(sizes))[:, None]
    return choices[rows, transform.choose(rng_keys)].reshape(len(sizes), -1)


def _lengthen(operations: Operations, length: int) -> Operations:
    """Return operations, OPERATION [n, k], followed by some that do nothing, OPERATION [n, length]."""
    lengthened = np.zeros((len(operations), length), operations.dtype)
    lengthened[:, : operations.shape[1]] = operations
    return lengthened
