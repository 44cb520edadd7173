"""Feeds: how an epoch's batches come out of torch's worker processes, for each of the two that hold an order.

A feed keeps a plain loader of torch's, which lives as long as its workers do, and tells it where to begin.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch.utils.data
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from shardio.datasets import EpochSampler, ShardDataset
from shardio.datasets.bad_samples import BadSamples, Broken, Skipped, read_with
from shardio.datasets.map_dataset import MapDataset
from shardio.datasets.map_epoch import known_epoch
from shardio.datasets.subsets import Inner, look_inside, sample_rng_keys
from shardio.datasets.valid import mark_valid
from shardio.errors import SampleError
from shardio.interruptions import is_interruption, let_through
from shardio.loader.ending import before_the_end
from shardio.loader.messages import Failed
from shardio.order import Cursor, EpochCounter, Split, Words
from shardio.torch_modes import own_tensors
from shardio.world import World


def holds_order(dataset: Any, sampler: Any) -> bool:
    """Say whether the order of a loader's samples is shardio's. A sampler that overrides it has another one."""
    if isinstance(dataset, ShardDataset):
        return True
    return isinstance(sampler, EpochSampler) and all(
        getattr(type(sampler), name) is getattr(EpochSampler, name) for name in ("__iter__", "__len__")
    )


def make_feed(dataset: Any, sampler: Any, bad_samples: BadSamples | None) -> ShardFeed | SamplerFeed | None:
    """Return what feeds a loader of these; None if neither of them holds shardio's order."""
    if not holds_order(dataset, sampler):
        return None
    return (
        ShardFeed(dataset, bad_samples)
        if isinstance(dataset, ShardDataset)
        else SamplerFeed(dataset, sampler, bad_samples)
    )


class ShardFeed:
    """Feeds a ShardDataset: its copies in the workers compute their batches themselves."""

    def __init__(self, dataset: ShardDataset, bad_samples: BadSamples | None) -> None:
        self.source = dataset
        dataset.has_loader = True
        self._bad_samples = bad_samples
        self._counter = EpochCounter()
        self._num_epoch_sets = 0
        self._world: World | None = None
        self._bound: ShardDataset | None = None
        self._workers: torch.utils.data.DataLoader[Any] | None = None

    def get_counter(self) -> EpochCounter:
        """Return what decides on the next epoch, after it heard of the dataset's own ``set_epoch``.

        The counter is the loader's, not the dataset's, which may serve several loaders.
        """
        if self.source.num_epoch_sets != self._num_epoch_sets:
            self._num_epoch_sets = self.source.num_epoch_sets
            self._counter.set_epoch(self.source.epoch)
        return self._counter

    def start(self, cursor: Cursor, split: Split, options: Mapping[str, Any]) -> WorkersBatches:
        """Start an epoch; return its batches. ``options`` are the arguments for torch's loader."""
        world = World(rank=split.rank, world_size=split.world_size)
        are_new = self._bound is None or not options["persistent_workers"] or world != self._world
        if self._bad_samples is not None:
            self._bad_samples.begin_count(options["num_workers"], are_new=are_new)
        if are_new:
            self._world, self._bound = world, self.source.bound(split, self._bad_samples)
            self._workers = torch.utils.data.DataLoader(self._bound, **options)
        assert self._bound is not None, "made before the first epoch"
        assert self._workers is not None, "made with it"
        self._bound.start_at(cursor)
        return WorkersBatches(iter(self._workers), self._bad_samples, cursor.epoch)


class EpochTaker(torch.utils.data.Sampler[None]):
    """The sampler of a loader of a ShardDataset. It draws nothing: frameworks tell samplers the epoch, not loaders."""

    def __init__(self, feed: ShardFeed) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[None]:
        return itertools.repeat(None)

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the loader's next ``iter`` is."""
        self._feed.get_counter().set_epoch(epoch)


class SamplerFeed:
    """Feeds a map-style dataset in the order of an EpochSampler, which runs in this process."""

    def __init__(self, dataset: Any, sampler: EpochSampler, bad_samples: BadSamples | None) -> None:
        self.source = sampler
        sampler.has_loader = True
        self._dataset = _TicketDataset(dataset, bad_samples)
        self._bad_samples = bad_samples
        self._tickets = _Tickets(sampler)
        self._workers: torch.utils.data.DataLoader[Any] | None = None

    def get_counter(self) -> EpochCounter:
        """Return what decides on the next epoch: the sampler's own counter, so that its ``set_epoch`` counts too."""
        return self.source.counter

    def start(self, cursor: Cursor, split: Split, options: Mapping[str, Any]) -> WorkersBatches:
        """Start an epoch; return its batches. ``options`` are the arguments for torch's loader."""
        is_batched = options["batch_size"] is not None
        self._tickets.begin(cursor, split, is_batched=is_batched)
        are_new = self._workers is None or not options["persistent_workers"]
        if self._bad_samples is not None:
            self._bad_samples.begin_count(options["num_workers"], are_new=are_new)
        if are_new:
            tickets = {"batch_size": 1, "batch_sampler": self._tickets} if is_batched else {"sampler": self._tickets}
            self._workers = torch.utils.data.DataLoader(self._dataset, **{**options, **tickets})
        assert self._workers is not None, "made before the first epoch"
        return WorkersBatches(iter(self._workers), self._bad_samples, cursor.epoch)


class WorkersBatches:
    """The batches of an epoch that torch's loader makes, in its workers or here.

    Args:
        batches: Torch's iterator.
        bad_samples: Warns at the end of samples that could not be read.
        epoch: The epoch, where it is known.
        goes_on: Whether the next batch can be taken after the error of one. Other errors end the epoch.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        bad_samples: BadSamples | None = None,
        epoch: int | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        self._batches: Iterator[Any] | None = batches
        self._bad_samples, self._epoch, self._goes_on = bad_samples, epoch, goes_on

    def take(self) -> Any:
        """Return the next batch, or Failed in its place."""
        assert self._batches is not None, "it was not closed"
        try:
            with before_the_end(), own_tensors():
                batch = next(self._batches)
        except StopIteration:
            self.close()
            if self._bad_samples is not None:
                self._bad_samples.warn_of_counted(self._epoch)
            raise
        except Exception as error:
            if not (self._goes_on and _is_of_a_batch(error)) or is_interruption(error):
                raise
            return Failed(serial=0, error=error, traceback=None)
        if isinstance(batch, Failed):
            batch.explain()
        return batch

    def close(self) -> None:
        """Release the workers, unless they stay for the next epoch."""
        self._batches = None


def _is_of_a_batch(error: Exception) -> bool:
    """Say whether an error of torch's iterator is a batch's, and not the sampler's or that of a worker that died."""
    of_batches = {ExceptionWrapper.reraise.__code__, _MapDatasetFetcher.fetch.__code__}
    return any(frame.f_code in of_batches for frame, _ in traceback.walk_tb(error.__traceback__))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ticket:
    """An index, and what a worker must know beside it. ``is_valid`` is None where samples carry no mark."""

    number: int
    seed: int
    epoch: int
    is_valid: bool | None


class _Tickets:
    """The sampler that torch's loader gets: one epoch of an EpochSampler, from where it begins."""

    def __init__(self, sampler: EpochSampler) -> None:
        self._sampler = sampler
        self._batches: Iterator[list[_Ticket]] = iter(())
        self._is_batched = True

    def begin(self, cursor: Cursor, split: Split, *, is_batched: bool) -> None:
        """Say what the next iteration is."""
        self._batches = self._write(cursor, split)
        self._is_batched = is_batched

    def __iter__(self) -> Iterator[Any]:
        return self._batches if self._is_batched else itertools.chain.from_iterable(self._batches)

    def _write(self, cursor: Cursor, split: Split) -> Iterator[list[_Ticket]]:
        is_marked, seed = split.remainder == "mask", self._sampler.seed
        for positions, samples in self._sampler.batches(cursor, split):
            valid = (positions < split.num_samples).tolist()
            yield [
                _Ticket(number=number, seed=seed, epoch=cursor.epoch, is_valid=is_valid if is_marked else None)
                for number, is_valid in zip(samples.tolist(), valid, strict=True)
            ]


class _TicketDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset that is read by tickets."""

    def __init__(self, dataset: Any, bad_samples: BadSamples | None) -> None:
        self.dataset = dataset
        self._bad_samples = bad_samples

    def __getitem__(self, ticket: _Ticket) -> Any:
        return self.__getitems__([ticket])[0]

    def __getitems__(self, tickets: list[_Ticket]) -> list[Any]:
        try:
            return self._read(tickets)
        except Exception as error:
            let_through(error)
            return [Broken(error)]  # Torch's loader shall take it for a batch: its iterator would end, or not count it.

    def _read(self, tickets: list[_Ticket]) -> list[Any]:
        numbers = np.array([ticket.number for ticket in tickets])
        seed, epoch = tickets[0].seed, tickets[0].epoch
        inner = _look_inside_ours(self.dataset)
        rng_keys, replacement_rng_keys = sample_rng_keys(inner, seed, epoch, numbers)
        with known_epoch(seed, epoch):
            samples = read_with(
                self._bad_samples,
                partial(_read, inner),
                numbers,
                rng_keys,
                replacement_rng_keys,
                epoch=epoch,
                describe=inner.describe if isinstance(inner.dataset, MapDataset) else None,
            )
        return [
            sample if ticket.is_valid is None or isinstance(sample, Skipped) else mark_valid(sample, ticket.is_valid)
            for sample, ticket in zip(samples, tickets, strict=True)
        ]


def _look_inside_ours(dataset: Any) -> Inner:
    """Look through Subsets of what can be asked with keys. Of anything else the outermost is asked, as by torch."""
    inner = look_inside(dataset)
    return inner if _takes_keys(inner.dataset) else Inner(dataset=dataset, subsets=())


def _takes_keys(dataset: Any) -> bool:
    methods = ("__getitem__", "__getitems__")
    return isinstance(dataset, MapDataset) and all(
        getattr(type(dataset), name) is getattr(MapDataset, name) for name in methods
    )


def _read(inner: Inner, numbers: NDArray[np.int64], rng_keys: Words) -> list[Any]:
    dataset: Any = inner.dataset
    if _takes_keys(dataset):
        return list(dataset.read(inner.find(numbers), rng_keys))  # With the keys of what was replaced.
    read_several = getattr(dataset, "__getitems__", None)
    try:
        return list(read_several(numbers.tolist())) if callable(read_several) else [dataset[int(n)] for n in numbers]
    except SampleError as error:
        if len(numbers) == 1:
            raise error.at_row(0) from error
    # The error does not say which of these samples failed: read them one by one to find it.
    samples, place = list[Any](), 0
    try:
        for place in range(len(numbers)):
            samples += _read(inner, numbers[place : place + 1], rng_keys[place : place + 1])
    except SampleError as error:
        raise error.at_row(place) from error
    return samples
