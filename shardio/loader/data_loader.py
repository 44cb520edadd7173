"""DataLoader: torch's DataLoader with shardio's order, exact batches and a state."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch.utils.data

from shardio.bad_samples import OnError
from shardio.datasets import TOO_LATE
from shardio.errors import Stage
from shardio.loader.accelerated import Preparable
from shardio.loader.arguments import (
    Fixed,
    check_dataset,
    check_order,
    check_policy,
    check_prefetch_factor,
    check_samplers_dataset,
    check_stages,
    make_bad_samples,
    sole_split,
    warn_of_no_batches,
    warn_of_whole_epochs,
)
from shardio.loader.collate import collate_channels_last, yields_images
from shardio.loader.epoch_iterator import EpochIterator
from shardio.loader.executors.choice import fetches, find_settings, make_executor, why_not_ours
from shardio.loader.executors.chunk_sizing import DefaultPrefetch
from shardio.loader.executors.executor import BatchIterator, Executor
from shardio.loader.executors.obstacles import explain_obstacles
from shardio.loader.executors.pipeline import SUPERSEDED
from shardio.loader.executors.settings import ExecutorSettings, find_decoder
from shardio.loader.fetching.epochs import Epochs
from shardio.loader.fetching.job import WorkerMethod
from shardio.loader.slots.slot_pool import MemoryCallback
from shardio.loader.state import OrderSampler, Stateful, find_order
from shardio.loader.stats import LoaderStats
from shardio.order import Cursor, Progress, Remainder, Split
from shardio.torch_modes import own_tensors
from shardio.values import check_choice, check_integer, check_optional_integer

NO_STATS = "per-stage timings are not available, because torch makes these batches: {reason}"


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _Batch = TypeVar("_Batch", covariant=True, default=Any)
else:
    from typing import TypeVar

    _Batch = TypeVar("_Batch", covariant=True)


class DataLoader(Preparable, Stateful, torch.utils.data.DataLoader[_Batch]):
    """torch's DataLoader, extended with shardio's order, a resumable state and shardio's worker processes.

    With a :class:`shardio.ShardDataset`, or an :class:`shardio.EpochSampler` as ``sampler``, the loader has shardio's
    order: every ``iter`` begins the next epoch unless ``set_epoch`` sets one, ``drop_last=True`` means
    ``remainder="drop"``, and ``state_dict`` counts the batches that the user received. Otherwise the loader behaves
    like torch's and has no state. This also applies to subclasses of EpochSampler that override ``__iter__`` or
    ``__len__``: call ``set_epoch`` before each epoch, as with torch's samplers.

    Images that shardio's datasets and transforms produce are delivered as uint8 tensors [N, 3, H, W] in the
    channels_last memory format.

    >>> loader = DataLoader(ShardDataset("out", shuffle=True), batch_size=128)  # doctest: +SKIP
    >>> for images, labels in loader: ...  # doctest: +SKIP

    On Linux, ``num_workers`` worker processes of shardio's (or fewer with as many threads, on few processors) decode
    shardio's datasets (and subclasses that override nothing) and torch's Subsets and ConcatDatasets of the map-style
    ones, with any transform and ``collate_fn`` that can be pickled, if none of these is used: ``batch_size=None``,
    ``worker_init_fn``, ``multiprocessing_context``. They write to memory that is reused when a batch is
    freed, so its tensors cannot be enlarged in place. torch's workers make all other batches, including those of a
    ConcatDataset whose parts differ in their settings. Before ``collate_fn``, the first sample's rng key seeds the
    generators of torch, numpy and Python, unless the dataset has ``seed_transforms=False``.

    All arguments not listed here are those of ``torch.utils.data.DataLoader``.

    Args:
        prefetch_factor: In shardio's worker processes, the number of batches that all workers together prepare in
            advance. By default 2, or more if batches are too small to keep all workers busy.
        on_error: What happens to samples of shardio's datasets that cannot be read or decoded. ``raise`` raises an
            error that names the sample. ``replace`` uses another sample of the same dataset or Subset, chosen by the
            seed, the epoch and the sample. ``skip`` leaves the sample out, so the batch is smaller; a batch that would
            be empty raises an error. At the end of an epoch, a RuntimeWarning reports how many samples were replaced
            or skipped.
        on_error_in: Where errors count as those of a sample: to ``read`` it, to ``decode`` it (also by your own
            decoders), and in your own ``transform`` or ``transform_sample``. Any other error is raised.
        quarantine: The file that logs replaced and skipped samples, one JSON object per line. The constructor checks
            that it can be written; the first entry creates it.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If arguments contradict each other or the dataset, or the quarantine file cannot be written.
    """

    on_error: Any = Fixed()
    on_error_in: Any = Fixed()
    quarantine: Any = Fixed()
    shuffle: Any = Fixed()
    counts_when_received = True
    """Batches count when the user receives them, not when a prefetcher requests them."""

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
        worker_method: WorkerMethod = "multiprocessing",
        snapshot_every_n_steps: int = 1,
        on_error: OnError = "raise",
        on_error_in: Collection[Stage] = ("read", "decode"),
        quarantine: str | os.PathLike[str] = "quarantine.jsonl",
    ) -> None:
        check_dataset(dataset, shuffle=shuffle, drop_last=drop_last)
        if collate_fn is None and batch_size is not None and yields_images(dataset):
            collate_fn = collate_channels_last
        batch_size = check_optional_integer("batch_size", batch_size, at_least=1)
        num_workers = check_integer("num_workers", num_workers)  # torch checks the rest.
        prefetch_factor = check_prefetch_factor(prefetch_factor)
        self.worker_method: WorkerMethod = check_choice("worker_method", worker_method, WorkerMethod)
        self.snapshot_every_n_steps = check_integer("snapshot_every_n_steps", snapshot_every_n_steps, at_least=0)
        self.on_error: OnError = check_choice("on_error", on_error, OnError)
        self.on_error_in = check_stages(on_error_in)
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
            self.prefetch_factor = DefaultPrefetch(self.prefetch_factor)
        self.shuffle = shuffle  # Frameworks re-create loaders from attributes named like the arguments.
        self._latest: object = None  # A token for the latest iteration.
        self._warned_of = set[Split]()  # Epochs without batches.
        self._made: tuple[ExecutorSettings, Executor] | None = None  # The latest executor, and what it was made from.
        self._memory_callbacks: list[MemoryCallback] = []
        self._order = find_order(dataset, self.sampler)
        self._epochs = Epochs()
        check_samplers_dataset(dataset, self._drawing_sampler, compares_digests=True)
        check_policy(
            self.on_error,
            dataset,
            has_order=self._order is not None,
            has_batches=self.batch_sampler is not None,
            obstacle=why_not_ours(self),
        )
        self._bad_samples = make_bad_samples(self.on_error, self.on_error_in, self.quarantine, self.dataset)
        if self._order is not None:
            ordered = self._order.ordered
            check_order(ordered, batch_size=self.batch_size, drop_last=self.drop_last, in_order=self.in_order)
            if dataset is ordered:
                # torch's loader forbids setting the sampler, but only frameworks read this one.
                object.__setattr__(self, "sampler", OrderSampler(self._order))
            ordered.has_loader = True  # Last: a loader that is refused leaves its sampler as it was.

    def watch_memory(self, callback: MemoryCallback) -> None:
        """Register a callback that is called once for each block of memory that holds batches.

        The callback receives the block as a uint8 [n] array, and must not keep a reference to it.
        """
        if callback not in self._memory_callbacks:
            self._memory_callbacks.append(callback)

    def __len__(self) -> int:
        """Return the number of this rank's batches in a full epoch."""
        return super().__len__() if self._order is None else self._split(Cursor(epoch=0)).num_batches

    @explain_obstacles
    def __iter__(self) -> Any:
        """Begin the next epoch and return an iterator over its batches."""
        with own_tensors():
            check_samplers_dataset(self.dataset, self._drawing_sampler)
            cursor, split = self._find_start()
            executor = self._find_executor()
        with own_tensors() if yields_images(self.dataset) else nullcontext():  # The user's code has the user's modes.
            return self._begin(executor.start(cursor, split), cursor, split)

    def start_workers(self) -> None:
        """Start the next epoch's worker processes now instead of when it begins, for example before building a model.

        This does not wait for them. It does nothing if they are there already, without workers, or if torch's workers
        make the batches.
        """
        with own_tensors():
            self._find_executor().start_workers()

    def stats(self) -> LoaderStats:
        """Return the counts and times since the latest ``iter`` of the loader.

        Raises:
            TypeError: If torch makes the batches, because torch does not time the stages. It makes them in any
                of these cases: on macOS; if the dataset is not shardio's; if your code cannot be pickled; if an
                argument such as ``worker_init_fn`` is set.
        """
        if (stats := self._find_executor().stats()) is None:
            raise TypeError(NO_STATS.format(reason=why_not_ours(self)))
        return stats

    @property
    def runs_torchs_workers(self) -> bool:
        """Whether torch's workers make the batches, instead of shardio's worker processes or the calling process."""
        return why_not_ours(self) is not None

    @property
    def _fetches(self) -> bool:
        """Whether samples come from the user's dataset itself."""
        return fetches(self)

    def _find_executor(self) -> Executor:
        """Return the executor for the current attributes, which may be set at any time."""
        settings = find_settings(self)
        if self._made is None or not settings.is_same(self._made[0]):
            self._made = (
                settings,
                make_executor(self, settings, self._order, self._epochs, self._bad_samples, self._memory_callbacks),
            )
        return self._made[1]

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
        decoder, token, fetches = find_decoder(self.dataset), object(), self._fetches
        self._latest = token

        def check() -> None:
            if decoder is not find_decoder(self.dataset):
                raise RuntimeError(TOO_LATE)
            if self.persistent_workers and self._latest is not token and not fetches:
                raise RuntimeError(SUPERSEDED)

        if self._order is None or cursor is None or split is None:
            modes = own_tensors if yields_images(self.dataset) else nullcontext  # The user's code has the user's modes.
            return EpochIterator(batches, check, modes, None, self)
        progress = Progress(cursor=cursor, split=split)
        iterator = self._follow(EpochIterator(batches, check, own_tensors, progress, self), progress)
        counter = self._order.update_counter()
        counter.start(self._order.ordered.num_all_samples)
        counter.progress = progress
        return iterator

    def _warn_of_sampler(self) -> None:
        """Warn if the sampler gives every rank all samples, or if there are no batches."""
        sampler = self.sampler if self.batch_sampler is None else self.batch_sampler
        warn_of_whole_epochs(self.dataset, sampler, stacklevel=6)
        if self.drop_last and yields_images(self.dataset) and hasattr(self.sampler, "__len__") and not len(self):
            warn_of_no_batches(sole_split(len(self.sampler), self.batch_size), self._warned_of, stacklevel=6)

    @property
    def _drawing_sampler(self) -> Any:
        """The sampler of single samples."""
        return getattr(self.batch_sampler, "sampler", self.sampler)

    def _split(self, cursor: Cursor) -> Split:
        assert self._order is not None, "the caller checked"
        remainder: Remainder = "drop" if self.drop_last else self._order.ordered.remainder
        return self._order.ordered.split(cursor, batch_size=self.batch_size or 1, remainder=remainder)

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts its own workers.
        return {**self.__dict__, "_made": None, "_iterator": None}
