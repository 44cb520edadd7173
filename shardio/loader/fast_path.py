"""The fast path: shardio's datasets with shardio's transforms, in hosts and slots instead of torch's workers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from shardio.datasets import ImageFolder, ShardDataset, ShardMapDataset
from shardio.datasets.bad_samples import BadSamples
from shardio.loader.batches import BatchPlan
from shardio.loader.crews import CallerCrew, Crew, HostCrew
from shardio.loader.delivery import Delivery, Source
from shardio.loader.layouts import Sizes
from shardio.loader.messages import Plan
from shardio.loader.stats import Tally
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize

FastDataset = ShardDataset | ShardMapDataset | ImageFolder

_TRANSFORMS: frozenset[type] = frozenset([CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize])

DEFAULT_PREFETCH = 2
"""Batches that are made ahead, by all workers together: one to take at any time, one to work on."""


def can_go_fast(dataset: Any) -> TypeGuard[FastDataset]:
    """Say whether hosts can make a dataset's samples: nothing of it is the user's own code."""
    if type(dataset) not in (ShardDataset, ShardMapDataset, ImageFolder) or not sys.platform.startswith("linux"):
        return False
    decoder = dataset.decoder
    return decoder.decode == "array" and not decoder.trusted and _is_ours(decoder.transform)


def _is_ours(transform: Callable[[Any], Any] | None) -> bool:
    if type(transform) is Compose:
        return all(map(_is_ours, transform.transforms))
    return transform is None or type(transform) in _TRANSFORMS


class FastPath:
    """Delivers the epochs of one loader.

    Args:
        dataset: For which :func:`can_go_fast`.
        batch_size: Samples of a full batch.
        num_workers: Decoding threads, in hosts; 0 for the training process itself.
        prefetch: Batches made ahead, if the user says.
        is_persistent: Whether the hosts outlive an epoch.
        timeout_s: How long to wait for a batch at the most; 0 for ever.
        bad_samples: Decides on what cannot be read; None for an error.
    """

    def __init__(
        self,
        dataset: FastDataset,
        *,
        batch_size: int,
        num_workers: int,
        prefetch: int | None,
        is_persistent: bool,
        timeout_s: float,
        bad_samples: BadSamples | None,
    ) -> None:
        self._dataset = dataset
        self._num_workers = num_workers
        self._is_persistent = is_persistent
        self._timeout_s = timeout_s
        self._sizes = Sizes(
            batch_size=batch_size,
            num_threads=max(num_workers, 1),
            chunk_size=dataset.decoder.chunk_size,
            prefetch=prefetch or DEFAULT_PREFETCH,
        )
        self._bad_samples = bad_samples
        self._crew: Crew | None = None
        self._last: Callable[[], Delivery | None] = _nothing
        self.tally = Tally(num_workers=num_workers)

    def start(self, plans: Iterator[BatchPlan]) -> Delivery:
        """Begin an epoch; an unfinished one before it ends, where hosts are persistent."""
        last = self._last()
        if last is not None and self._is_persistent:
            last.close()
        if self._crew is None or not self._is_persistent or not self._crew.is_here():
            self._crew = self._make_crew(self._crew)
        self.tally = Tally(num_workers=self._num_workers)
        dataset = self._dataset
        delivery = Delivery(
            Source(decoder=dataset.decoder, locate=dataset.locate, describe=dataset.describe),
            plans,
            self._crew,
            self._sizes,
            self._bad_samples,
            self._timeout_s,
            self.tally,
            closes_crew=not self._is_persistent,
        )
        self._last = weakref.ref(delivery)
        return delivery

    def __getstate__(self) -> dict[str, Any]:
        # A copy, or a pickled one, gets hosts of its own.
        return {**self.__dict__, "_crew": None, "_last": _nothing}

    def _make_crew(self, former: Crew | None) -> Crew:
        reader, decoder = self._dataset.reader, self._dataset.decoder
        crew: Crew
        if self._num_workers:
            crew = HostCrew(Plan(reader=reader, decoder=decoder, num_threads=self._num_workers))
        else:
            crew = CallerCrew(reader, decoder)
        if former is not None and former.is_laid_out:
            crew.lay_out(former.layout, self._sizes.num_ahead(former.layout))
        return crew


def _nothing() -> None:
    """Stand for the reference to a delivery before there is one."""
