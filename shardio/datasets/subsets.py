"""Torch's Subsets, looked through: which samples of the dataset within they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from shardio.datasets.indices import check_indices, check_integers
from shardio.datasets.map_epoch import augment_rng_keys
from shardio.order import Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """A dataset, and the Subsets around it.

    Attributes:
        dataset: The dataset that is no Subset.
        subsets: The Subsets around it, the outermost first; none where the dataset is used as a whole.
    """

    dataset: Any
    subsets: tuple[Subset[Any], ...]

    def __len__(self) -> int:
        """Return how many samples the outermost has."""
        return len(self.subsets[0] if self.subsets else self.dataset)

    def find(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return samples' numbers in the inner dataset, from those in the outermost, int64 [n].

        The indices are asked anew each time, as by torch, and never copied as a whole.

        Raises:
            TypeError: If a Subset has an index that is not an integer.
            IndexError: If it has one that is outside of what it is of.
        """
        if not self.subsets:
            return numbers
        for subset in self.subsets:
            numbers = _take(subset.indices, numbers)
        return check_indices(numbers, len(self.dataset))

    def locate(self, numbers: NDArray[np.int64]) -> Any:
        """Return what the inner dataset's reader reads samples by."""
        return self.dataset.locate(self.find(numbers))

    def describe(self, number: int) -> tuple[str, str]:
        """Return a sample's key and where it lies, for messages."""
        key, where = self.dataset.describe(int(self.find(np.array([number]))[0]))
        return key, where


def look_inside(dataset: Any) -> Inner:
    """Look through torch's Subsets, however deep. A subclass may do what it likes, and is not looked through."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    return Inner(dataset=dataset, subsets=tuple(subsets))


def sample_rng_keys(
    inner: Inner, seed: int, epoch: int, numbers: NDArray[np.int64], draws: Words | None = None
) -> tuple[Words, Words]:
    """Return two keys for each sample: of its transforms, and by which another is drawn if it cannot be read.

    The transforms go by the number in the inner dataset: a sample looks the same in all its Subsets. What replaces it
    is drawn from the outermost alone, and by the number there.

    Args:
        inner: The dataset, and the Subsets around it.
        seed: Of the order, or the dataset's own.
        epoch: The epoch's number.
        numbers: int64 [n], the samples' numbers in the outermost.
        draws: uint64 [n], how often each was drawn before in the epoch, where a sampler repeats samples.

    Returns:
        Keys and lots, uint64 [n].
    """
    replacement_rng_keys = augment_rng_keys(seed, epoch, numbers, draws)
    return augment_rng_keys(
        seed, epoch, inner.find(numbers), draws
    ) if inner.subsets else replacement_rng_keys, replacement_rng_keys


def _take(indices: Any, numbers: NDArray[Any]) -> NDArray[Any]:
    if isinstance(indices, torch.Tensor | np.ndarray):  # One by one a tensor takes 2.4 µs each.
        return check_integers(np.asarray(indices)[numbers])
    return check_integers([indices[number] for number in numbers.tolist()])
