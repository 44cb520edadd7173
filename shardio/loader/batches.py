"""Plan the batches of shardio's datasets, and collate their samples."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from shardio.datasets import (
    ImageFolder,
    MixedDataset,
    Ordered,
    RaggedTensor,
    ShardDataset,
    ShardMapDataset,
    Unwrapped,
    check_indices,
    decode_samples,
    mark_valid,
    read_ahead,
)
from shardio.decoding import FieldDecoder, find_wide
from shardio.epochs import hand_over
from shardio.loader.sampler_epochs import Epochs, Indices
from shardio.loader.saved_state import EpochPosition, SamplerPosition
from shardio.order import Cursor, Split, Words, derive_rng_key, make_rng_key
from shardio.reading import StoredSamples, read_batches_ahead, read_nothing_ahead
from shardio.transforms import Calls, Generators, Ragged


@dataclass(slots=True, kw_only=True)
class BatchPlan:
    """The samples of a batch or a chunk.

    Attributes:
        indices: int64 [n], the samples' indices in the loader's dataset.
        rng_keys: uint64 [n], one for each sample's transforms.
        replacement_rng_keys: uint64 [n], the rng keys that draw replacements for unreadable samples.
        valid: bool [n], false for repeats; None unless the remainder policy marks them.
    """

    indices: NDArray[np.int64]
    rng_keys: Words
    replacement_rng_keys: Words
    valid: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def take(self, rows: slice | NDArray[np.int64]) -> BatchPlan:
        """Return the plan for some of the rows."""
        return BatchPlan(
            indices=self.indices[rows],
            rng_keys=self.rng_keys[rows],
            replacement_rng_keys=self.replacement_rng_keys[rows],
            valid=None if self.valid is None else self.valid[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSource:
    """The source of an epoch's samples.

    Attributes:
        dataset: The loader's dataset: one of shardio's datasets, perhaps within torch's Subsets.
        decoder: The dataset's decoder at the beginning of the epoch.
        epoch: The epoch, if known.
        takes_tiles: Whether images are collected as tiles, for a device to decode.
    """

    dataset: Unwrapped
    decoder: FieldDecoder
    epoch: int | None
    takes_tiles: bool = False

    @property
    def column_names(self) -> tuple[str, ...]:
        """The name of each column of a batch. The crops of an image are one column of tiles."""
        return self.decoder.names if self.takes_tiles else self.decoder.column_names


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEpoch:
    """The plans of an epoch.

    Attributes:
        plans: The plan of each batch.
        source: The source of the samples.
        progress: Counts the batches that the user receives; None in shardio's order, where the iterator counts them.
    """

    plans: Iterator[BatchPlan]
    source: SampleSource
    progress: SamplerProgress | None = None


class Planner(Protocol):
    """The interface of planners, which plan the batches of epochs.

    Attributes:
        dataset: The loader's dataset: one of shardio's datasets, perhaps within torch's Subsets.
    """

    dataset: Unwrapped

    def plan(self, cursor: Cursor | None, split: Split | None) -> PlannedEpoch:
        """Begin an epoch and return its plans.

        Args:
            cursor: The start of the epoch; None if the order is not shardio's.
            split: This rank's share, from the cursor to the end; None if the order is not shardio's.

        Raises:
            IndexError: If a sampler yields an empty batch or an index out of range. The iterator of plans raises
                this error.
        """


class OrderPlanner:
    """A planner of batches in shardio's order.

    Args:
        dataset: The loader's dataset.
        order: The order.
    """

    def __init__(self, dataset: Unwrapped, order: Ordered) -> None:
        self.dataset, self._order = dataset, order

    def plan(self, cursor: Cursor | None, split: Split | None) -> PlannedEpoch:
        assert cursor is not None, "the order is shardio's"
        assert split is not None, "the order is shardio's"
        source = SampleSource(dataset=self.dataset, decoder=self.dataset.dataset.decoder, epoch=cursor.epoch)
        return PlannedEpoch(plans=self._plan(cursor, split), source=source)

    def _plan(self, cursor: Cursor, split: Split) -> Iterator[BatchPlan]:
        with read_ahead(self._order, self.dataset.dataset, cursor, split, self.dataset.inner_indices) as advance:
            for positions, indices in self._order.steps(cursor, split):
                valid = split.find_valid(np.concatenate(positions))
                rng_keys, replacement_rng_keys = self.dataset.rng_keys(self._order.seed, cursor.epoch, indices)
                plans = BatchPlan(
                    indices=indices, rng_keys=rng_keys, replacement_rng_keys=replacement_rng_keys, valid=valid
                )
                stop = 0
                for batch in positions:
                    start, stop = stop, stop + len(batch)
                    advance(len(batch))
                    yield plans.take(slice(start, stop))


class SamplerPlanner:
    """A planner of the batches that a loader's batch sampler yields.

    Args:
        dataset: The loader's dataset, which is map-style.
        loader: The loader.
        epochs: The positions at which the loader's epochs begin.
    """

    def __init__(self, dataset: Unwrapped, loader: Any, epochs: Epochs) -> None:
        self.dataset, self._epochs = dataset, epochs
        self._loader = weakref.ref(loader)  # A weak reference, so that workers end when the loader is released.

    def plan(self, cursor: Cursor | None, split: Split | None) -> PlannedEpoch:
        inner = self.dataset.dataset
        known: tuple[int, int] | None = inner.map_epoch.known
        num_returned = np.zeros(len(self.dataset) if known else 0, np.uint32)

        def skip(batch: Any) -> None:
            if known:
                _count_repetitions(num_returned, check_indices(batch, len(self.dataset)))

        position, indices = self._epochs.begin(self._loader(), has_new_workers=True, skip=skip)
        progress = SamplerProgress(position, indices)
        return PlannedEpoch(
            plans=self._plan(position, progress, known, num_returned),
            source=SampleSource(dataset=self.dataset, decoder=inner.decoder, epoch=None if known is None else known[1]),
            progress=progress,
        )

    def _plan(
        self,
        position: EpochPosition,
        progress: SamplerProgress,
        known: tuple[int, int] | None,
        num_returned: NDArray[np.uint32],
    ) -> Iterator[BatchPlan]:
        assert position.base_seed is not None, "the seed is drawn when an epoch begins"
        base_rng_key = make_rng_key(position.base_seed, position.num_epochs_of_seed, "draws")
        num_samples, num_planned = len(self.dataset), position.num_samples
        remote = self.dataset.dataset.remote_samples()
        with read_nothing_ahead() if remote is None else read_batches_ahead(remote) as fetch:
            for batch in progress.indices:
                indices = check_indices(batch, num_samples)
                if not len(indices):
                    raise IndexError(
                        "the batch sampler yielded an empty batch: it must not yield batches without indices"
                    )
                fetch(self.dataset.inner_indices(indices))
                if known is None:
                    counters = np.arange(num_planned, num_planned + len(indices), dtype=np.uint64)
                    rng_keys = replacement_rng_keys = derive_rng_key(base_rng_key, counters)
                else:
                    repetitions = _count_repetitions(num_returned, indices)
                    rng_keys, replacement_rng_keys = self.dataset.rng_keys(*known, indices, repetitions)
                num_planned += len(indices)
                progress.note_plan(len(indices))
                yield BatchPlan(indices=indices, rng_keys=rng_keys, replacement_rng_keys=replacement_rng_keys)


class SamplerProgress:
    """An epoch of a loader's batch sampler, and the user's position in it.

    Args:
        position: The position at which the epoch begins; it is updated with each batch that the user receives.
        indices: The indices that the sampler yields.

    Attributes:
        indices: The indices that the sampler yields.
    """

    def __init__(self, position: EpochPosition, indices: Indices) -> None:
        self._position, self.indices = position, indices
        self._planned: deque[tuple[SamplerPosition, int]] = deque()  # For each undelivered batch.

    def note_plan(self, num_samples: int) -> None:
        """Record that the last yielded batch is planned."""
        self._planned.append((self.indices.position, num_samples))

    def count_one(self) -> None:
        """Count a batch as soon as no wrapper holds it back."""
        if self._planned:  # Otherwise, the sampler failed, and there is no batch.
            hand_over([partial(self._advance, *self._planned.popleft())])

    def finish(self) -> None:
        """Record the end of the epoch as soon as no wrapper holds it back."""
        hand_over([partial(self._end, self.indices.position)])

    def _advance(self, sampler: SamplerPosition, num_samples: int) -> None:
        position = self._position
        position.num_yielded += 1
        position.num_samples += num_samples
        position.sampler = sampler

    def _end(self, sampler: SamplerPosition) -> None:
        self._position.is_finished, self._position.sampler = True, sampler


def repeat_error(error: Exception) -> Iterator[BatchPlan]:
    """Return an iterator that raises the error of a failed sampler at every step."""
    return iter(partial(_raise, error), None)


def _raise(error: Exception) -> None:
    raise error


def _count_repetitions(num_returned: NDArray[np.uint32], indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return how often each sample of a batch was returned before, in earlier batches or earlier in this one.

    Args:
        num_returned: uint32 [N], how often each sample of the dataset was returned before; the batch is added in place.
        indices: int64 [n], the batch.
    """
    order = np.argsort(indices, kind="stable")
    firsts = np.flatnonzero(np.diff(indices[order], prepend=-1))
    within = np.arange(len(indices)) - np.repeat(firsts, np.diff(firsts, append=len(indices)))
    repetitions = num_returned[indices].astype(np.uint64)
    repetitions[order] += within.astype(np.uint64)
    np.add.at(num_returned, indices, 1)
    return repetitions


def yields_images(dataset: Any) -> bool:
    """Return whether a dataset is a ShardDataset, a ShardMapDataset, an ImageFolder or a MixedDataset.

    A Subset or a ConcatDataset qualifies if the datasets in it do.
    """
    if isinstance(dataset, Subset):
        return yields_images(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(yields_images, dataset.datasets))
    return isinstance(dataset, ShardDataset | ShardMapDataset | ImageFolder | MixedDataset)


def collate_channels_last(samples: Sequence[Any]) -> Any:
    """Collate samples as torch does, except that uint8 images become a channels_last tensor [N, 3, H, W].

    Raises:
        ValueError: If images differ in size, or if dicts have different keys.
        RuntimeError: If arrays differ in shape.
    """
    first = samples[0]
    if isinstance(first, dict) and (other := next((each for each in samples if each.keys() != first.keys()), None)):
        raise ValueError(f"the samples of a batch have different keys, {list(first)} and {list(other)}")
    return collate_column(samples)


def collate_column(values: Sequence[Any]) -> Any:
    """Collate the values of one field, as :func:`collate_channels_last` does.

    Args:
        values: The values. As in torch, strings are returned in a list if samples are strings or dicts, and in a tuple
            if samples are tuples.
    """
    try:
        functions: Any = {
            **default_collate_fn_map,
            torch.Tensor: _collate_tensors,
            Ragged: _list_tensors,
            RaggedTensor: _list_tensors,
        }
        return collate(values, collate_fn_map=functions)
    except Exception as error:
        _explain(values, error)
        raise


def _collate_tensors(values: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    if not _is_image(values[0]):
        try:
            collated: torch.Tensor = default_collate_fn_map[torch.Tensor](values, collate_fn_map=collate_fn_map)
        except RuntimeError as error:
            if len({tuple(value.shape) for value in values}) == 1:
                raise
            raise RuntimeError(
                f"{error}. The arrays of a batch differ in shape: use a transform that gives them the same shape, "
                "such as RandomResizedCrop(224) in a Compose with fields for masks, or pass a collate_fn that does not "
                "stack them"
            ) from error
        return collated
    check_equal_sizes(tuple(image.shape[1:]) for image in values)
    # Stack [3, H, W] views of [H, W, 3] memory in that memory layout, then view the result as [N, 3, H, W].
    # Use numpy, because torch.stack would start threads that compete with those of other workers.
    return torch.from_numpy(np.stack([image.permute(1, 2, 0).numpy() for image in values])).permute(0, 3, 1, 2)


def check_equal_sizes(sizes: Iterable[tuple[int, ...]]) -> None:
    """Raise ValueError if the images of a batch, whose heights and widths are given, differ in size."""
    differing = sorted(set(sizes))
    if len(differing) > 1:
        raise ValueError(
            f"the images of a batch differ in size (height, width), for example {differing[0]} and {differing[1]}: "
            "give the dataset a transform that returns images of the same size, such as RandomResizedCrop(224)"
        )


def _list_tensors(values: Sequence[Ragged | RaggedTensor], *, collate_fn_map: Any = None) -> list[torch.Tensor]:
    # Return a list even if the values are equally long, so that all batches hold the same types.
    return [
        value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        for value in values
    ]


def _is_image(value: torch.Tensor) -> bool:
    return value.dtype == torch.uint8 and value.ndim == 3 and value.shape[0] == 3


def _explain(samples: Sequence[Any], error: Exception) -> None:
    """Raise an error that names the sample that cannot be collated, if that sample is known."""
    for row, sample in enumerate(samples):
        for value in sample.values() if isinstance(sample, dict) else sample if type(sample) is tuple else [sample]:
            if value is None:
                raise TypeError(
                    f"sample {row} of a batch has None as a value, which a tensor cannot hold: replace it in "
                    "transform_sample= or collate_fn="
                ) from error
            if (wide := find_wide(value)) is not None:
                raise ValueError(
                    f"sample {row} of a batch holds the integer {wide}, which does not fit in 64 bits (signed), "
                    "so a tensor cannot hold it: store it as a string, or pass a collate_fn that does not convert it"
                ) from error


class Collation:
    """A builder that makes batches from stored samples with user code. Workers receive it with their setup.

    Args:
        collate_fn: The user's function, or the loader's own, if only ``transform_sample`` is user code.
        is_seeded: Whether the first sample's rng key seeds the generators that the function draws from.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], *, is_seeded: bool) -> None:
        self.collate_fn = collate_fn
        self._is_seeded = is_seeded
        self._generators: Generators | None = None

    def decode(self, decoder: FieldDecoder, stored: StoredSamples, rng_keys: Words, calls: Calls) -> list[Any]:
        """Return the samples that the dataset itself would yield."""
        return decode_samples(decoder, stored, rng_keys, calls)

    def collate(self, samples: Sequence[Any], rng_keys: Words, valid: NDArray[np.bool_] | None) -> tuple[Any, float]:
        """Return the batch, and the time that the function took, in seconds.

        Args:
            samples: n samples.
            rng_keys: uint64 [n], the rng keys of the samples.
            valid: bool [n], the marks of ``remainder="mask"``; None if samples are not marked.
        """
        if valid is not None:
            samples = [mark_valid(sample, is_valid) for sample, is_valid in zip(samples, valid.tolist(), strict=True)]
        if self._is_seeded and self._generators is None:
            self._generators = Generators([self.collate_fn])
        calls = Calls(self._generators)
        own_key = derive_rng_key(rng_keys[:1], make_rng_key(0, "collate"))
        (batch,) = calls.call([lambda _: self.collate_fn(list(samples))], [None], own_key)
        return batch, calls.elapsed_s

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generators": None}
