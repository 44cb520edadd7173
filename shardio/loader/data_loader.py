"""DataLoader: torch's, with shardio's order, exact batches and a state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch.utils.data

from shardio.datasets.bad_samples import OnError
from shardio.datasets.subsets import look_inside
from shardio.datasets.transformed import TOO_LATE, Transformed
from shardio.loader.accelerated import Preparable
from shardio.loader.arguments import (
    Fixed,
    check_dataset,
    check_order,
    check_policy,
    check_prefetch_factor,
    check_samplers_dataset,
    make_bad_samples,
    sole_split,
    warn_of_no_batches,
    warn_of_whole_epochs,
)
from shardio.loader.batches import ordered_batches, sampled_batches
from shardio.loader.collate import collate_channels_last, endless_collate, yields_images
from shardio.loader.delivery import SUPERSEDED
from shardio.loader.epoch_batches import Batches, EpochBatches
from shardio.loader.fast_path import FastPath, why_not_fast
from shardio.loader.feeds import EpochTaker, SamplerFeed, ShardFeed, WorkersBatches, holds_order, make_feed
from shardio.loader.layouts import Unsaid
from shardio.loader.slots import OnMemory
from shardio.loader.stateful import Stateful
from shardio.loader.stats import LoaderStats
from shardio.loader.workers import explain_obstacles, torch_options
from shardio.order import Cursor, Progress, Remainder, Split
from shardio.torch_modes import own_tensors
from shardio.values import check_choice, check_integer, check_optional_integer


class DataLoader(Preparable, Stateful, torch.utils.data.DataLoader[Any]):
    """Torch's DataLoader with the same arguments, and more where it is given shardio's order.

    With a :class:`shardio.ShardDataset`, or an :class:`shardio.EpochSampler` as ``sampler``, every ``iter``
    is the next epoch unless ``set_epoch`` names one, ``drop_last=True`` means ``remainder="drop"``, and
    ``state_dict`` counts the batches that the user received. Images of shardio's datasets come as uint8
    [N, 3, H, W] tensors in channels_last memory. With anything else it is torch's loader. So it is with a subclass of
    EpochSampler that overrides ``__iter__`` or ``__len__``: there is no state, and ``set_epoch`` names the epochs.

    >>> loader = DataLoader(ShardDataset("out", shuffle=True), batch_size=128)  # doctest: +SKIP
    >>> for images, labels in loader: ...  # doctest: +SKIP

    shardio's datasets, and torch's Subsets of the map-style ones, with shardio's transforms, and ``collate_fn``,
    ``worker_init_fn`` and ``multiprocessing_context`` left alone, are decoded by ``num_workers`` threads in a few
    background processes, into memory that is used again when the batch is freed. Its tensors cannot be resized in
    place. Everything else runs in torch's workers.

    Args: Those of ``torch.utils.data.DataLoader``, and
        prefetch_factor: In background processes of shardio's, how many batches all workers together make ahead; by
            default as many as give each worker two chunks of a batch to work on, and at least 2.
        on_error: What becomes of samples of shardio's datasets that cannot be read or decoded. ``raise`` stops with
            an error that names the sample; ``replace`` puts another one of the same dataset, or Subset, in its place,
            a function of seed, epoch and sample; ``skip`` makes its batch smaller, and changes nothing else. If every
            sample of a batch would be skipped, the batch raises an error. At the end of an epoch a RuntimeWarning says
            how many samples were replaced or skipped.
        quarantine: The file to which replaced and skipped samples are appended, a JSON object a line. Write
            access is checked at once; the file is created with its first line.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If arguments contradict each other or the dataset, or the quarantine file cannot be written.
    """

    on_error: Any = Fixed()
    quarantine: Any = Fixed()
    shuffle: Any = Fixed()
    counts_when_received = True
    """Batches count when the user receives them, and not when a prefetcher asks for them."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        on_error: OnError = "raise",
        quarantine: str | os.PathLike[str] = "quarantine.jsonl",
    ) -> None:
        check_dataset(dataset, shuffle=shuffle, drop_last=drop_last)
        if collate_fn is None and batch_size is not None and yields_images(dataset):
            collate_fn = collate_channels_last
        batch_size = check_optional_integer("batch_size", batch_size, at_least=1)
        num_workers = check_integer("num_workers", num_workers, at_least=0)
        prefetch_factor = check_prefetch_factor(prefetch_factor)
        self.on_error: OnError = check_choice("on_error", on_error, OnError)
        self.quarantine = quarantine
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if prefetch_factor is None and self.prefetch_factor is not None:
            self.prefetch_factor = Unsaid(self.prefetch_factor)
        self.shuffle = shuffle  # Frameworks make loaders again from attributes named like the arguments.
        self._started: Progress | None = None
        self._told_of = set[Split]()  # Epochs without batches.
        self._fast_path: FastPath | None = None
        self._fast_settings: tuple[Any, ...] = ()
        self._base_seed: tuple[int, int] | None = None
        self._memory_watchers: list[OnMemory] = []
        check_samplers_dataset(dataset, getattr(self.batch_sampler, "sampler", self.sampler), compares_digests=True)
        self._check_policy()
        self._bad_samples = make_bad_samples(self.on_error, self.quarantine, self.dataset)
        self._feed = make_feed(self.dataset, self.sampler, self._bad_samples)
        if self._feed is not None:
            source = self._feed.source
            check_order(source, batch_size=self.batch_size, drop_last=self.drop_last, in_order=self.in_order)
        if isinstance(self._feed, ShardFeed):
            # torch's loader refuses to have its sampler set, though nothing but frameworks looks at this one.
            object.__setattr__(self, "sampler", EpochTaker(self._feed))

    def watch_memory(self, watcher: OnMemory) -> None:
        """Register a callback for each block of memory, uint8 [n], that batches arrive in; it must not keep it."""
        if watcher not in self._memory_watchers:
            self._memory_watchers.append(watcher)

    def __len__(self) -> int:
        """Return the number of batches of this rank in a full epoch."""
        return super().__len__() if self._feed is None else self._split(self._feed, Cursor(epoch=0)).num_batches

    @explain_obstacles
    def __iter__(self) -> Any:
        """Start the next epoch; iterate over its batches."""
        with own_tensors():
            return self._start()

    def _start(self) -> Any:
        check_samplers_dataset(self.dataset, getattr(self.batch_sampler, "sampler", self.sampler))
        feed, fast_path = self._feed, self._choose_fast_path()
        if feed is None:
            sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
            warn_of_whole_epochs(self.dataset, sampler, stacklevel=5)
            if self.drop_last and yields_images(self.dataset) and hasattr(self.sampler, "__len__") and not len(self):
                warn_of_no_batches(sole_split(len(self.sampler), self.batch_size), self._told_of)
            return self._start_torchs() if fast_path is None else self._start_sampler(fast_path)
        # First what may fail: an epoch that could not be started is not counted.
        crew = None if fast_path is None else fast_path.ready_crew()
        counter = feed.get_counter()
        cursor = counter.find_start(feed.source.num_all_samples)
        progress = Progress(cursor=cursor, split=self._split(feed, cursor))
        if progress.is_over and cursor.position == 0:
            warn_of_no_batches(progress.split, self._told_of)
        if fast_path is not None and crew is not None:
            plans = ordered_batches(fast_path.inner, feed.source, cursor, progress.split)
            batches: Batches = fast_path.start(crew, plans, cursor.epoch, pins=self._pins)
        else:
            batches = feed.start(cursor, progress.split, torch_options(self))
        check = partial(self._check_current, progress, self._decoder)
        followed = self._follow(EpochBatches(batches, check, progress, type(self.dataset).__name__), progress)
        counter.start(feed.source.num_all_samples)
        counter.progress = self._started = progress
        return followed

    def stats(self) -> LoaderStats:
        """Return what happened, and where the time went, since the loader was last iterated.

        Raises:
            TypeError: If the fast path is not taken, that is if the dataset, its transforms, or how samples are
                collated is not shardio's own, or workers are not left to it: then torch's loader makes the batches,
                and does not say how long what takes.
        """
        fast_path = self._choose_fast_path()
        if fast_path is None:
            raise TypeError(
                "there are no statistics where torch's loader makes the batches, and it does because "
                f"{self._why_not_fast()}"
            )
        return fast_path.tally.sum_up()

    @property
    def runs_torchs_workers(self) -> bool:
        """Whether torch's workers make the batches, and not shardio's background processes or this one."""
        return self._why_not_fast() is not None

    def _start_torchs(self) -> Iterator[Any]:
        with endless_collate(self):
            batches = super().__iter__()
        return EpochBatches(WorkersBatches(batches, goes_on=True)) if yields_images(self.dataset) else batches

    def _start_sampler(self, fast_path: FastPath) -> Iterator[Any]:
        if self._base_seed is None or not self.persistent_workers:
            # As torch's own iterators begin: with a draw for the workers' seeds, once for workers that stay.
            seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator).item())
            self._base_seed = seed, 0
        seed, epoch = self._base_seed
        self._base_seed = seed, epoch + 1
        sampler: Any = self.batch_sampler
        inner = fast_path.inner
        plans, known = sampled_batches(inner, sampler, seed, epoch), inner.dataset.map_epoch.known
        known_epoch = None if known is None else known[1]
        batches = fast_path.start(fast_path.ready_crew(), plans, known_epoch, pins=self._pins)
        return EpochBatches(batches, batches.check)

    @property
    def _pins(self) -> bool:
        """Whether batches go to torch's pinned memory: the user wants that, and there is a device."""
        return self.pin_memory and torch.cuda.is_available()

    @property
    def _decoder(self) -> Any:
        """What makes values of samples, where the dataset is shardio's: another one has another transform."""
        inner = look_inside(self.dataset).dataset
        return inner.decoder if isinstance(inner, Transformed) else None

    def _check_current(self, progress: Progress, decoder: Any) -> None:
        if decoder is not self._decoder:
            raise RuntimeError(TOO_LATE)
        if self.persistent_workers and progress is not self._started:
            raise RuntimeError(SUPERSEDED)

    def _split(self, feed: ShardFeed | SamplerFeed, cursor: Cursor) -> Split:
        remainder: Remainder = "drop" if self.drop_last else feed.source.remainder
        return feed.source.split(cursor, batch_size=self.batch_size or 1, remainder=remainder)

    def _choose_fast_path(self) -> FastPath | None:
        """Return who delivers by hosts and slots, for the attributes as they are now: they may be set at any time."""
        if self._why_not_fast() is not None:
            return None
        prefetch = None if isinstance(self.prefetch_factor, Unsaid) else self.prefetch_factor
        inner = look_inside(self.dataset)
        settings = (inner, inner.dataset.decoder, self.num_workers, prefetch, self.timeout, self.persistent_workers)
        if self._fast_path is None or self._fast_settings != settings:
            self._fast_settings = settings
            self._fast_path = FastPath(
                inner,
                batch_size=self.batch_size,
                num_workers=self.num_workers,
                prefetch=prefetch,
                is_persistent=self.persistent_workers,
                timeout_s=self.timeout,
                bad_samples=self._bad_samples,
                memory_watchers=self._memory_watchers,
            )
        return self._fast_path

    def _why_not_fast(self) -> str | None:
        """Return why torch's loader makes the batches, if it does."""
        if (why := why_not_fast(self.dataset)) is not None:
            return why
        for name, default in (("worker_init_fn", None), ("multiprocessing_context", None), ("in_order", True)):
            if getattr(self, name) != default:
                return f"{name} is {getattr(self, name)!r}"
        if self.collate_fn is not collate_channels_last:
            return "batch_size is None" if self.batch_sampler is None else f"collate_fn is {self.collate_fn!r}"
        return None

    def __getstate__(self) -> dict[str, Any]:
        # A copy gets hosts of its own.
        return {**self.__dict__, "_fast_path": None}

    def _check_policy(self) -> None:
        check_policy(
            self.on_error,
            self.dataset,
            has_order=holds_order(self.dataset, self.sampler),
            has_batches=self.batch_sampler is not None,
            obstacle=self._why_not_fast(),
        )
