"""Unwrap torch's Subsets and ConcatDatasets of shardio's datasets, and find the members that subclasses override."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset

from shardio.datasets.map_datasets import ImageFolder, MapDataset, ShardMapDataset
from shardio.datasets.ordered import ShardDataset
from shardio.datasets.ranked import Iterated
from shardio.datasets.samples import Transformed, check_indices, check_integers
from shardio.decoding import FieldDecoder
from shardio.order import Words, augment_rng_keys
from shardio.process import let_through
from shardio.reading import JoinedReader, Reader, RemoteParts, RemoteSamples

_OVERRIDABLE = frozenset(
    {
        *("__annotations__", "__dict__", "__doc__", "__firstlineno__", "__init__", "__module__", "__orig_bases__"),
        *("__parameters__", "__repr__", "__static_attributes__", "__str__", "__weakref__"),
    }
)
"""The names that a subclass may define without changing how samples are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwrapped:
    """A dataset and the Subsets around it.

    Attributes:
        dataset: The inner dataset, which is not a Subset; a :class:`Concatenated` for a ConcatDataset that can be read
            as one dataset.
        subsets: The Subsets around the inner dataset, outermost first; empty if there are none.
    """

    dataset: Any
    subsets: tuple[Subset[Any], ...]

    @property
    def datasets(self) -> tuple[Any, ...]:
        """The user's datasets: the Subsets (outermost first), the inner dataset, and that dataset's parts."""
        inner = self.dataset.datasets if isinstance(self.dataset, JoinedDataset) else (self.dataset,)
        return (*self.subsets, *inner)

    @property
    def kind(self) -> str:
        """The kind of dataset, for messages."""
        return " of a ".join(type(each).__name__ for each in self.datasets[: len(self.subsets) + 1])

    def __len__(self) -> int:
        return len(self.subsets[0] if self.subsets else self.dataset)

    def inner_indices(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map indices in the outermost dataset to indices in the inner dataset, int64 [n].

        Like torch, this method reads a Subset's indices on every call and never copies the whole list.

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
        """Return samples in the form that the inner dataset's reader accepts."""
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
        comes from the outermost dataset, so its choice depends on the index in that dataset.

        Args:
            seed: The seed of the order or of the dataset.
            epoch: The epoch's number.
            indices: int64 [n], the samples' indices in the outermost dataset.
            repetitions: uint64 [n], the number of times that a sampler returned each sample earlier in the epoch; None
                if no sample was returned before.

        Returns:
            Two arrays uint64 [n].
        """
        if not self.subsets and isinstance(self.dataset, JoinedDataset):
            joined = self.dataset.rng_keys(seed, epoch, indices, repetitions)
            return joined, joined
        outer = augment_rng_keys(seed, epoch, indices, repetitions)
        if not self.subsets:
            return outer, outer
        return augment_rng_keys(seed, epoch, self.inner_indices(indices), repetitions), outer


def unwrap(dataset: Any) -> Unwrapped:
    """Unwrap torch's Subsets and ConcatDatasets at any depth.

    A subclass of Subset or ConcatDataset may override anything, so it is not unwrapped. A ConcatDataset is unwrapped
    only if all of its parts are shardio's datasets and are decoded in the same way.
    """
    subsets = []
    while type(dataset) is Subset and not _mixes(dataset.dataset):
        subsets.append(dataset)
        dataset = dataset.dataset
    if _mixes(dataset):
        dataset = dataset.joined
    if type(dataset) is ConcatDataset:
        parts = unwrap_parts(dataset)
        if why_not_concatenated(parts) is None:
            dataset = Concatenated(dataset, parts)
    return Unwrapped(dataset=dataset, subsets=tuple(subsets))


def _mixes(dataset: Any) -> bool:
    # A Subset of a mixture holds positions in the mixture, and the mixture itself calls its sources.
    return isinstance(dataset, Iterated) and dataset.joined is not dataset


def unwrap_parts(concat: ConcatDataset[Any]) -> list[Unwrapped]:
    """Unwrap each dataset of a ConcatDataset."""
    return [unwrap(part) for part in concat.datasets]


def _take(subset_indices: Any, indices: NDArray[Any]) -> NDArray[Any]:
    if isinstance(subset_indices, torch.Tensor | np.ndarray):  # Index only once: each access to a tensor takes 2.4 µs.
        return check_integers(np.asarray(subset_indices)[indices])
    return check_integers([subset_indices[index] for index in indices.tolist()])


class JoinedDataset(MapDataset):
    """The base class of datasets that consist of several datasets.

    The decoder and the reader of all samples are used only if shardio's own code can read the samples.
    """

    def __init__(self, parts: Sequence[Unwrapped], decoder: FieldDecoder, reader: Reader) -> None:
        super().__init__(decoder, reader)
        self._parts = parts

    @property
    def datasets(self) -> tuple[Any, ...]:
        """The user's dataset that consists of several datasets, followed by those datasets."""
        raise NotImplementedError  # Abstract: only the subclass knows the user's dataset.

    def divide(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of each sample's dataset, and the sample's index in that dataset, int64 [n]."""
        raise NotImplementedError  # Abstract: each kind of dataset numbers its samples.

    def rng_keys(self, seed: int, epoch: int, indices: NDArray[np.int64], repetitions: Words | None = None) -> Words:
        """Return one rng key for each sample's transforms, uint64 [n]: see :meth:`Unwrapped.rng_keys`."""
        return augment_rng_keys(seed, epoch, indices, repetitions)

    def locate(self, indices: NDArray[np.int64]) -> Any:
        located: list[Any] = [None] * len(indices)
        for number, rows, inner in self._divide(indices):
            for row, sample in zip(rows.tolist(), self._parts[number].locate(inner), strict=True):
                located[row] = (number, sample)
        return located

    def remote_samples(self) -> RemoteSamples | None:
        inner = [part.dataset for part in self._parts]
        parts = [each.remote_samples() if isinstance(each, Transformed) else None for each in inner]
        if not any(parts):
            return None
        return RemoteParts(
            parts,
            lambda indices: (
                (number, self._parts[number].inner_indices(inner)) for number, _, inner in self._divide(indices)
            ),
        )

    def _divide(self, indices: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        # Yield each part's number, the rows of its samples, and their indices in the part.
        numbers, inner = self.divide(indices)
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            yield number, rows, inner[rows]

    def check_transform(self) -> None:
        for part in self._parts:
            if isinstance(part.dataset, Transformed):
                part.dataset.check_transform()


class Concatenated(JoinedDataset):
    """A ConcatDataset whose parts are decoded in the same way.

    Random transforms depend on a sample's index in the ConcatDataset, so if a dataset is concatenated with
    itself, its samples look different each time.
    """

    def __init__(self, concat: ConcatDataset[Any], parts: Sequence[Unwrapped]) -> None:
        inner = [part.dataset for part in parts]
        super().__init__(parts, inner[0].decoder, JoinedReader([each.reader for each in inner]))
        self.map_epoch = inner[0].map_epoch
        self._concat = concat

    @property
    def datasets(self) -> tuple[Any, ...]:
        return (self._concat, *(dataset for part in self._parts for dataset in part.datasets))

    def divide(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        stops = np.array(self._concat.cumulative_sizes)
        numbers = np.searchsorted(stops, indices, side="right")
        return numbers, indices - np.where(numbers > 0, stops[numbers - 1], 0)

    def __len__(self) -> int:
        return len(self._concat)


def why_not_concatenated(parts: Sequence[Unwrapped], noun: str = "dataset") -> str | None:
    """Return the reason why several datasets cannot be read as one; None if they can be. ``noun`` names them."""
    first = parts[0].dataset
    for number, part in enumerate(parts):
        dataset = part.dataset
        if not isinstance(dataset, ShardMapDataset | ImageFolder | Concatenated):
            return f"its {noun} {number} is a {part.kind}"
        if not isinstance(dataset, Concatenated) and (overridden := find_overridden(type(dataset))):
            return f"its {noun} {number} is a {part.kind}, which overrides {overridden}"
        if (name := _find_difference(first.decoder, dataset.decoder)) is not None:
            return f"its {noun}s 0 and {number} differ in {name}"
        if first.map_epoch.known != dataset.map_epoch.known:
            return f"its {noun}s 0 and {number} differ in their epoch (see set_epoch)"
    return None


def find_overridden(kind: type) -> str:
    """Return the name of a member of shardio's dataset that a subclass overrides; "" if there is none.

    A subclass may choose its samples in its constructor, and add members. A subclass with any other change is
    treated as the user's own dataset.
    """
    ours = next(each for each in kind.__mro__ if each in (ShardDataset, ShardMapDataset, ImageFolder))
    added = {name: None for each in kind.__mro__[: kind.__mro__.index(ours)] for name in vars(each)}
    names = (name for name in added if hasattr(ours, name) and name not in _OVERRIDABLE)
    return next(names, "")


def _find_difference(one: FieldDecoder, other: FieldDecoder) -> str | None:
    if one is other:
        return None
    names = (field.name for field in fields(FieldDecoder))
    return next((name for name in names if not _is_same(getattr(one, name), getattr(other, name))), None)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:  # Compare pickles, because comparing user objects with == may raise an error.
        return type(one) is type(other) and pickle.dumps(one) == pickle.dumps(other)
    except Exception as error:  # User classes may raise any exception.
        let_through(error)
        return False
