"""The fast path: shardio's datasets with shardio's transforms, in hosts and slots instead of torch's workers."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardio.datasets import ImageFolder, ShardDataset, ShardMapDataset
from shardio.datasets.bad_samples import BadSamples
from shardio.datasets.subsets import Inner, look_inside
from shardio.datasets.transformed import TOO_LATE
from shardio.loader.batches import BatchPlan
from shardio.loader.crews import CallerCrew, Crew, HostCrew
from shardio.loader.delivery import Delivery
from shardio.loader.layouts import Sizes
from shardio.loader.messages import Plan
from shardio.loader.slots import OnMemory
from shardio.loader.source import Source
from shardio.loader.stats import Tally
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize

_TRANSFORMS: frozenset[type] = frozenset([CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize])


def why_not_fast(dataset: Any) -> str | None:
    """Return why hosts cannot make a dataset's samples; None if nothing of it is the user's own code."""
    inner = look_inside(dataset)
    names = [type(each).__name__ for each in (*inner.subsets, inner.dataset)]
    if type(inner.dataset) not in (ShardMapDataset, ImageFolder) and type(dataset) is not ShardDataset:
        return (
            f"the dataset is a {' of a '.join(names)}, and not exactly a ShardDataset, ShardMapDataset or ImageFolder, "
            "or torch's Subset of one of the last two"
        )
    if not hasattr(os, "memfd_create"):
        return "this Python has no os.memfd_create, as on Linux with glibc 2.27 and newer"
    decoder = inner.dataset.decoder
    if decoder.trusted:
        return "trusted=True lets fields run code"
    if decoder.decode != "array" or not _is_ours(decoder.transform):
        return f"the transform {decoder.transform!r} is not shardio's alone"
    return None


def _is_ours(transform: Callable[[Any], Any] | None) -> bool:
    if type(transform) is Compose:
        return all(map(_is_ours, transform.transforms))
    return transform is None or type(transform) in _TRANSFORMS


class FastPath:
    """Delivers the epochs of one loader.

    Args:
        inner: A dataset for which :func:`why_not_fast` has nothing to say, looked through.
        batch_size: Samples of a full batch, if the user says.
        num_workers: Decoding threads, in hosts; 0 for the training process itself.
        prefetch: Batches made ahead, if the user says.
        is_persistent: Whether the hosts outlive an epoch.
        timeout_s: How long to wait for a batch at the most; 0 for ever.
        bad_samples: Decides on what cannot be read; None for an error.
        memory_watchers: Told of memory in which batches will arrive.
    """

    def __init__(
        self,
        inner: Inner,
        *,
        batch_size: int | None,
        num_workers: int,
        prefetch: int | None,
        is_persistent: bool,
        timeout_s: float,
        bad_samples: BadSamples | None,
        memory_watchers: Sequence[OnMemory],
    ) -> None:
        self.inner = inner
        self._memory_watchers = memory_watchers
        self._batch_size = batch_size
        self._num_workers = num_workers
        self._is_persistent = is_persistent
        self._timeout_s = timeout_s
        self._bad_samples = bad_samples
        chunk_size = inner.dataset.decoder.chunk_size
        self._sizes = Sizes(num_threads=max(num_workers, 1), chunk_size=chunk_size, prefetch=prefetch)
        self._crew: Crew | None = None
        self._last: Callable[[], Delivery | None] = _nothing
        self.tally = Tally(num_workers=num_workers)
        self._began = self.tally.began

    def ready_crew(self) -> Crew:
        """Return what makes the next epoch's batches; persistent hosts end an unfinished epoch before it."""
        self._began = time.perf_counter()
        if self._is_persistent and (last := self._last()) is not None:
            last.close(superseded=True)
        former = self._crew
        if former is None or former.is_closed or not self._is_persistent or not former.is_here():
            self._crew = self._make_crew()
            if former is not None and former.is_laid_out:
                self._crew.lay_out(former.layout, self._sizes.num_ahead(former.layout))
        assert self._crew is not None, "it was just made"
        return self._crew

    def start(self, crew: Crew, plans: Iterator[BatchPlan], epoch: int | None, *, pins: bool) -> Delivery:
        """Begin an epoch with the crew of :meth:`ready_crew`.

        Args:
            crew: Makes the batches.
            plans: Their samples.
            epoch: The epoch's number, where it is known.
            pins: Whether batches go to torch's pinned memory.
        """
        self.tally = Tally(num_workers=self._num_workers, began=self._began)
        inner, decoder = self.inner, self.inner.dataset.decoder

        def check() -> None:
            if inner.dataset.decoder is not decoder:
                raise RuntimeError(TOO_LATE)

        delivery = Delivery(
            Source(decoder=decoder, locate=inner.locate, describe=inner.describe, epoch=epoch, check=check),
            plans,
            self._batch_size,
            crew,
            self._sizes,
            self._bad_samples,
            self._timeout_s,
            self.tally,
            closes_crew=not self._is_persistent,
            pins=pins,
        )
        self._last = weakref.ref(delivery)
        return delivery

    def _make_crew(self) -> Crew:
        reader, decoder = self.inner.dataset.reader, self.inner.dataset.decoder
        if not self._num_workers:
            return CallerCrew(reader, decoder)
        return HostCrew(Plan(reader=reader, decoder=decoder, num_threads=self._num_workers), self._memory_watchers)


def _nothing() -> None:
    """Stand for the reference to a delivery before there is one."""
