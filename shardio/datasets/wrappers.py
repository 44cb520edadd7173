"""Unwrapping of torch's Subsets and ConcatDatasets: which samples of shardio's datasets they select."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from shardio.datasets.concatenated import Concatenated, why_not_concatenated
from shardio.datasets.indices import check_indices, check_integers
from shardio.order import Words, augment_rng_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwrapped:
    """A dataset and the Subsets around it.

    Attributes:
        dataset: The inner dataset, which is not a Subset; a :class:`Concatenated` for a ConcatDataset that can be read
            as one dataset.
        subsets: The Subsets around it, outermost first; empty if there are none.
    """

    dataset: Any
    subsets: tuple[Subset[Any], ...]

    @property
    def datasets(self) -> tuple[Any, ...]:
        """The user's datasets: the Subsets, outermost first, the dataset inside, and those that it concatenates."""
        inner = self.dataset.datasets if isinstance(self.dataset, Concatenated) else (self.dataset,)
        return (*self.subsets, *inner)

    @property
    def kind(self) -> str:
        """What it is, for messages."""
        return " of a ".join(type(each).__name__ for each in (*self.subsets, self.dataset))

    def __len__(self) -> int:
        """Return the number of samples of the outermost dataset."""
        return len(self.subsets[0] if self.subsets else self.dataset)

    def inner_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map indices in the outermost dataset to indices in the inner dataset, int64 [n].

        Like torch, this reads a Subset's indices on every call and never copies the whole list.

        Raises:
            TypeError: If a Subset holds an index that is not an integer.
            IndexError: If a Subset holds an index that is out of range.
        """
        if not self.subsets:
            return indices
        for subset in self.subsets:
            indices = _take(subset.indices, indices)
        return check_indices(indices, len(self.dataset))

    def locate(self, indices: NDArray[np.int64]) -> Any:
        """Return what the reader of the inner dataset needs to find samples."""
        return self.dataset.locate(self.inner_indices(indices))

    def describe(self, index: int) -> tuple[str, str]:
        """Return a sample's key and location, for messages."""
        key, where = self.dataset.describe(int(self.inner_indices(np.array([index]))[0]))
        return key, where

    def rng_keys(
        self, seed: int, epoch: int, indices: NDArray[np.int64], repetitions: Words | None = None
    ) -> tuple[Words, Words]:
        """Return two rng keys for each sample: one for its transforms, and one that draws a replacement.

        Transforms depend on the index in the inner dataset, so a sample looks the same in all Subsets. A replacement
        comes from the outermost dataset, so it depends on the index there.

        Args:
            seed: The seed of the order or of the dataset.
            epoch: The epoch's number.
            indices: int64 [n], the samples' indices in the outermost dataset.
            repetitions: uint64 [n], how often a sampler returned each sample earlier in the epoch; None if never.

        Returns:
            Two arrays uint64 [n].
        """
        outer = augment_rng_keys(seed, epoch, indices, repetitions)
        if not self.subsets:
            return outer, outer
        return augment_rng_keys(seed, epoch, self.inner_indices(indices), repetitions), outer


def unwrap(dataset: Any) -> Unwrapped:
    """Unwrap torch's Subsets and ConcatDatasets at any depth.

    A subclass may override anything, so it is not unwrapped. A ConcatDataset whose parts are not all shardio's, or not
    decoded alike, stays as it is.
    """
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        parts = unwrap_parts(dataset)
        if why_not_concatenated(parts) is None:
            dataset = Concatenated(dataset, parts)
    return Unwrapped(dataset=dataset, subsets=tuple(subsets))


def unwrap_parts(concat: ConcatDataset[Any]) -> list[Unwrapped]:
    """Unwrap each dataset of a ConcatDataset."""
    return [unwrap(part) for part in concat.datasets]


def _take(subset_indices: Any, indices: NDArray[Any]) -> NDArray[Any]:
    if isinstance(subset_indices, torch.Tensor | np.ndarray):  # Indexing a tensor one by one takes 2.4 µs.
        return check_integers(np.asarray(subset_indices)[indices])
    return check_integers([subset_indices[index] for index in indices.tolist()])
