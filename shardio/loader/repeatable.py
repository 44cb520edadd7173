"""How an epoch begins: where, with which share of the samples, and which iterator the user gets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from shardio.datasets import TOO_LATE
from shardio.loader.arguments import check_samplers_dataset, sole_split, warn_of_no_batches, warn_of_whole_epochs
from shardio.loader.collate import yields_images
from shardio.loader.epoch_iterator import EpochIterator
from shardio.loader.executors.executor import BatchIterator, Executor
from shardio.loader.executors.pipeline import SUPERSEDED
from shardio.loader.executors.settings import find_decoder
from shardio.loader.state import LoaderOrder
from shardio.order import Cursor, Progress, Remainder, Split
from shardio.torch_modes import own_tensors


class Repeatable:
    """A loader whose every ``iter`` begins an epoch."""

    _order: LoaderOrder | None
    _latest: object  # A token for the latest iteration.
    _shared: weakref.ref[EpochIterator] | None
    _warned_of: set[Split]  # Epochs without batches.
    dataset: Any
    sampler: Any
    batch_sampler: Any
    batch_size: int | None
    drop_last: bool
    persistent_workers: bool

    def _find_executor(self) -> Executor:
        """Return what makes the batches."""
        raise NotImplementedError  # Each loader has its own.

    def _follow(self, batches: Iterator[Any], progress: Progress) -> Iterator[Any]:
        """Return an epoch's batches, perhaps in a wrapper."""
        raise NotImplementedError  # Each loader has its own.

    def _iterate(self) -> Any:
        """Begin the next epoch and return an iterator over its batches, on the CPU."""
        with own_tensors():
            check_samplers_dataset(self.dataset, self._drawing_sampler)
            cursor, split = self._find_start()
            executor = self._find_executor()
        with own_tensors() if yields_images(self.dataset) else nullcontext():  # The user's code has the user's modes.
            return self._begin(executor.start(cursor, split), cursor, split)

    def _find_start(self) -> tuple[Cursor | None, Split | None]:
        """Return the next epoch's start and this rank's share; both are None if the order is not shardio's."""
        if self._order is None:
            self._warn_of_sampler()
            return None, None
        cursor = self._order.update_counter().find_start(self._order.ordered.num_all_samples)
        split = self._split(cursor)
        if not split.num_batches and not cursor.position:
            warn_of_no_batches(split, self._warned_of, stacklevel=5)
        return cursor, split

    def _begin(self, batches: BatchIterator, cursor: Cursor | None, split: Split | None) -> Any:
        """Return the user's iterator. The epoch counts only from here on, when nothing else can fail."""
        decoder, token = find_decoder(self.dataset), object()
        self._latest = token

        def check() -> None:
            if decoder is not find_decoder(self.dataset):
                raise RuntimeError(TOO_LATE)
            if self.persistent_workers and self._latest is not token:
                raise RuntimeError(SUPERSEDED)

        if self._order is None or cursor is None or split is None:
            modes = own_tensors if yields_images(self.dataset) else nullcontext  # The user's code has the user's modes.
            return self._share(batches, check, modes)
        progress = Progress(cursor=cursor, split=split)
        iterator = self._follow(EpochIterator(batches, check, own_tensors, progress, self), progress)
        counter = self._order.update_counter()
        counter.start(self._order.ordered.num_all_samples)
        counter.progress = progress
        return iterator

    def _share(
        self, batches: BatchIterator, check: Callable[[], None], modes: Callable[[], AbstractContextManager[None]]
    ) -> EpochIterator:
        """Return an iterator without shardio's order. As in torch, persistent workers always have the same one."""
        shared = self._shared() if self.persistent_workers and self._shared is not None else None
        if shared is None:
            shared = EpochIterator(batches, check, modes, None, self)
            self._shared = weakref.ref(shared)
        else:
            shared.begin(batches, check, modes)
        return shared

    def _warn_of_sampler(self) -> None:
        """Warn if the sampler gives every rank all samples, or if there are no batches."""
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        warn_of_whole_epochs(self.dataset, sampler, stacklevel=6)
        if (
            self.drop_last
            and yields_images(self.dataset)
            and hasattr(self.sampler, "__len__")
            and not len(cast(Sized, self))
        ):
            warn_of_no_batches(sole_split(len(self.sampler), self.batch_size), self._warned_of, stacklevel=6)

    @property
    def _drawing_sampler(self) -> Any:
        """The sampler of single samples."""
        return getattr(self.batch_sampler, "sampler", self.sampler)

    def _split(self, cursor: Cursor) -> Split:
        assert self._order is not None, "the caller checked"
        remainder: Remainder = "drop" if self.drop_last else self._order.ordered.remainder
        return self._order.ordered.split(cursor, batch_size=self.batch_size or 1, remainder=remainder)
