"""torch's ConcatDataset of shardio's map-style datasets, read as if it were one of them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from shardio.datasets.image_folder import ImageFolder
from shardio.datasets.map_dataset import MapDataset
from shardio.datasets.overrides import find_overridden
from shardio.datasets.shard_map_dataset import ShardMapDataset
from shardio.decoding import FieldDecoder
from shardio.interruptions import let_through
from shardio.reading import JoinedReader, LocatedSample, RemoteParts, RemoteSamples

if TYPE_CHECKING:
    from shardio.datasets.wrappers import Unwrapped


class Concatenated(MapDataset):
    """A ConcatDataset whose parts are decoded alike.

    Random transforms depend on a sample's index in the ConcatDataset, so a dataset that is concatenated with itself
    looks different each time.

    Args:
        concat: The ConcatDataset.
        parts: Its datasets, unwrapped, for which :func:`why_not_concatenated` returns None.
    """

    def __init__(self, concat: ConcatDataset[Any], parts: Sequence[Unwrapped]) -> None:
        inner = [part.dataset for part in parts]
        super().__init__(inner[0].decoder, JoinedReader([each.reader for each in inner]))
        self.map_epoch = inner[0].map_epoch
        self._concat, self._parts = concat, parts

    @property
    def datasets(self) -> tuple[Any, ...]:
        """The user's datasets: the ConcatDataset and all those in it."""
        return (self._concat, *(dataset for part in self._parts for dataset in part.datasets))

    def locate(self, indices: NDArray[np.int64]) -> list[LocatedSample]:
        located: list[Any] = [None] * len(indices)
        for number, rows, inner in self._divide(indices):
            for row, sample in zip(rows.tolist(), self._parts[number].locate(inner), strict=True):
                located[row] = (number, sample)
        return located

    def remote_samples(self) -> RemoteSamples | None:
        parts = [part.dataset.remote_samples() for part in self._parts]
        if not any(parts):
            return None
        return RemoteParts(
            parts,
            lambda indices: (
                (number, self._parts[number].inner_indices(inner)) for number, _, inner in self._divide(indices)
            ),
        )

    def _divide(self, indices: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the number of each part, the rows of its samples, and their indices in it."""
        stops = np.array(self._concat.cumulative_sizes)
        numbers = np.searchsorted(stops, indices, side="right")
        for number in np.unique(numbers).tolist():
            rows = np.flatnonzero(numbers == number)
            yield number, rows, indices[rows] - (stops[number - 1] if number else 0)

    def check_transform(self) -> None:
        for part in self._parts:
            part.dataset.check_transform()

    def __len__(self) -> int:
        return len(self._concat)


def why_not_concatenated(parts: Sequence[Unwrapped]) -> str | None:
    """Return why the datasets of a ConcatDataset cannot be read as one; None if they can."""
    first = parts[0].dataset
    for number, part in enumerate(parts):
        dataset = part.dataset
        if not isinstance(dataset, ShardMapDataset | ImageFolder | Concatenated):
            return f"its dataset {number} is a {part.kind}"
        if not isinstance(dataset, Concatenated) and (overridden := find_overridden(type(dataset))):
            return f"its dataset {number} is a {part.kind}, which overrides {overridden}"
        if (name := _find_difference(first.decoder, dataset.decoder)) is not None:
            return f"its datasets 0 and {number} differ in {name}"
        if first.map_epoch.known != dataset.map_epoch.known:
            return f"its datasets 0 and {number} differ in their epoch (see set_epoch)"
    return None


def _find_difference(one: FieldDecoder, other: FieldDecoder) -> str | None:
    """Return the name of a setting in which two decoders differ; None if they decode alike."""
    if one is other:
        return None
    names = (field.name for field in fields(FieldDecoder))
    return next((name for name in names if not _is_same(getattr(one, name), getattr(other, name))), None)


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two values are one object or have the same pickles. The ``==`` of people's objects may raise."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and pickle.dumps(one) == pickle.dumps(other)
    except Exception as error:  # People's classes may raise anything.
        let_through(error)
        return False
