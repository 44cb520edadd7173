"""DataLoader: torch's DataLoader with workers of shardio's, a state and, for shardio's datasets, its order."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.utils.data

from shardio.bad_samples import OnError
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
)
from shardio.loader.collate import collate_channels_last, yields_images
from shardio.loader.delivery import DeliveredBatches, make_delivery
from shardio.loader.epoch_iterator import EpochIterator
from shardio.loader.executors.choice import find_settings, is_torchs, make_executor, why_not_ours
from shardio.loader.executors.chunk_sizing import DefaultPrefetch
from shardio.loader.executors.executor import Executor
from shardio.loader.executors.settings import ExecutorSettings
from shardio.loader.fetching.epochs import Epochs
from shardio.loader.fetching.job import WorkerMethod
from shardio.loader.repeatable import Repeatable
from shardio.loader.slots.slot_pool import MemoryCallback, SlotWatch
from shardio.loader.state import OrderSampler, Stateful, find_order
from shardio.loader.stats import LoaderStats
from shardio.order import Cursor, Split
from shardio.torch_modes import own_tensors
from shardio.values import check_choice, check_flag, check_integer, check_optional_integer

NO_STATS = "per-stage timings are not available, because shardio's own code does not read these samples: {reason}"


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _Batch = TypeVar("_Batch", covariant=True, default=Any)
else:
    from typing import TypeVar

    _Batch = TypeVar("_Batch", covariant=True)


class DataLoader(Preparable, Stateful, Repeatable, torch.utils.data.DataLoader[_Batch]):
    """torch's DataLoader, extended with a resumable state, shardio's workers and shardio's order.

    It takes the place of torch's in any program: see docs/swapping.md. With a :class:`shardio.ShardDataset`, or an
    :class:`shardio.EpochSampler` as ``sampler``, the loader has shardio's order: every ``iter`` begins the next epoch
    unless ``set_epoch`` sets one, ``drop_last=True`` means ``remainder="drop"``, and the state fits any number of ranks
    and workers. Otherwise, the order is torch's and the state is that of torchdata's StatefulDataLoader. This also
    applies to subclasses of EpochSampler that override ``__iter__`` or ``__len__``: call ``set_epoch`` before each
    epoch, as with torch's samplers.

    Images that shardio's datasets and transforms produce are delivered as uint8 tensors [N, 3, H, W] in the
    channels_last memory format.

    >>> loader = DataLoader(ShardDataset("out", shuffle=True), batch_size=128)  # doctest: +SKIP
    >>> for images, labels in loader: ...  # doctest: +SKIP

    On Linux, ``num_workers`` worker processes of shardio's (or fewer with as many threads, on few processors) decode
    shardio's datasets (and subclasses that override nothing) and torch's Subsets and ConcatDatasets of the map-style
    ones, with any transform and ``collate_fn`` that can be pickled, if none of these is used: ``batch_size=None``,
    ``worker_init_fn``, ``multiprocessing_context``. Otherwise, as in torch, workers have a copy of the dataset and call
    its methods. All of them write to memory that is reused when a batch is freed, so its tensors cannot be enlarged in
    place. In shardio's datasets, before ``collate_fn``, the first sample's rng key seeds the generators of torch, numpy
    and Python, unless the dataset has ``seed_transforms=False``.

    All arguments not listed here are those of ``torch.utils.data.DataLoader``.

    Args:
        prefetch_factor: In shardio's worker processes, the number of batches that all workers together prepare in
            advance. By default 2, or more if batches are too small to keep all workers busy.
        worker_method: What workers are that call the dataset: processes, or threads that share it. Threads copy and
            pickle nothing; see :func:`shardio.get_worker_info`.
        snapshot_every_n_steps: After how many batches workers report the state of an iterable dataset that has one; 0
            for only at the beginning. A resumed run reads the batches since then again.
        on_error: What happens to samples of a map-style dataset that cannot be read or decoded. ``raise`` raises an
            error that names the sample. ``replace`` uses another sample of the same dataset or Subset, chosen by the
            sample and, in shardio's datasets, the seed and the epoch. ``skip`` leaves the sample out, so the batch is
            smaller; a batch that would be empty raises an error. At the end of an epoch, a RuntimeWarning reports how
            many samples were replaced or skipped.
        on_error_in: Where errors count as those of a sample: to ``read`` it, to ``decode`` it (also by your own
            decoders), and in your own ``transform`` or ``transform_sample``. Any other error is raised. In datasets
            that are not shardio's, all errors of ``__getitem__`` are of reading.
        quarantine: The file that logs replaced and skipped samples, one JSON object per line. The constructor checks
            that it can be written; the first entry creates it.
        check_duplicates: Whether to raise an error when an epoch repeats a sample; see :class:`shardio.check.guard`.
        device: Where batches are delivered, by :class:`shardio.DevicePrefetcher`; by default, they stay on the CPU.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If arguments contradict each other or the dataset, or the quarantine file cannot be written.
    """

    on_error: Any = Fixed()
    on_error_in: Any = Fixed()
    quarantine: Any = Fixed()
    shuffle: Any = Fixed()
    check_duplicates: Any = Fixed()
    device: Any = Fixed()
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
        check_duplicates: bool = False,
        device: str | torch.device | None = None,
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
        self.check_duplicates = check_flag("check_duplicates", check_duplicates)
        self.device = device
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
        self._shared: weakref.ref[EpochIterator] | None = None  # Weak: it holds the loader.
        self._warned_of = set[Split]()  # Epochs without batches.
        self._made: tuple[ExecutorSettings, Executor] | None = None  # The latest executor, and what it was made from.
        self._watches: list[SlotWatch] = []  # Those of the epoch that begins.
        self._order = find_order(dataset, self.sampler)
        self._epochs = Epochs()
        check_samplers_dataset(dataset, self._drawing_sampler, compares_digests=True)
        check_policy(
            self.on_error,
            dataset,
            has_order=self._order is not None,
            has_batches=self.batch_sampler is not None,
            is_fetched=not self._is_torchs,
            obstacle=why_not_ours(self),
        )
        self._bad_samples = make_bad_samples(self.on_error, self.on_error_in, self.quarantine, self.dataset)
        if self._order is not None:
            ordered = self._order.ordered
            check_order(ordered, batch_size=self.batch_size, drop_last=self.drop_last, in_order=self.in_order)
            if dataset is ordered:
                # torch's loader forbids setting the sampler, but only frameworks read this one.
                object.__setattr__(self, "sampler", OrderSampler(self._order))
            ordered.has_loader = True  # Late: a loader that is refused leaves its sampler as it was.
        self._delivery = make_delivery(self, checks=self.check_duplicates, device=device)

    @contextmanager
    def watch_memory(self, callback: MemoryCallback, *, num_held: int = 0) -> Iterator[None]:
        """Call a function once for each block of memory that holds batches of the epochs that begin in the block.

        Batches of other epochs lie in other memory.

        Args:
            callback: Receives the memory as a uint8 [n] array, and must not keep a reference to it.
            num_held: How many batches the caller holds at a time, besides those that it has passed on. There is memory
                for as many more batches then.
        """
        watch = SlotWatch(callback=callback, num_held=num_held)
        self._watches.append(watch)
        try:
            yield
        finally:
            self._watches.remove(watch)

    def __len__(self) -> int:
        """Return the number of this rank's batches in a full epoch."""
        return super().__len__() if self._order is None else self._split(Cursor(epoch=0)).num_batches

    def __iter__(self) -> Any:
        """Begin the next epoch and return an iterator over its batches."""
        return self._iterate() if self._delivery is None else DeliveredBatches(self._delivery, self)

    def start_workers(self) -> None:
        """Start the next epoch's worker processes now instead of when it begins, for example before building a model.

        This does not wait for them. It does nothing if they are there already, without workers, or if the dataset's
        own methods make the samples.
        """
        with own_tensors():
            self._find_executor().start_workers()

    def stats(self) -> LoaderStats:
        """Return the counts and times since the latest ``iter`` of the loader.

        Raises:
            TypeError: If torch's own iterators make the batches, which do not time the stages: those of torch's
                datapipes and, outside of Linux, all batches of workers.
        """
        if (stats := self._find_executor().stats()) is None:
            raise TypeError(NO_STATS.format(reason=why_not_ours(self)))
        return stats

    @property
    def calls_dataset(self) -> bool:
        """Whether the dataset's own methods make the samples, instead of shardio's own code, which is faster."""
        return why_not_ours(self) is not None

    @property
    def _is_torchs(self) -> bool:
        """Whether torch's own iterators make the batches."""
        return is_torchs(self)

    def _find_executor(self) -> Executor:
        """Return the executor for the current attributes, which may be set at any time."""
        settings = find_settings(self)
        if self._made is None or not settings.is_same(self._made[0]):
            self._made = (
                settings,
                make_executor(self, settings, self._order, self._epochs, self._bad_samples, self._watches),
            )
        return self._made[1]

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts its own workers.
        return {**self.__dict__, "_made": None, "_iterator": None, "_shared": None, "_delivery": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epochs = copy.deepcopy(self._epochs)  # The original may go on.
        if self._order is not None:
            self._order = self._order.copy()
            if isinstance(self.sampler, OrderSampler):
                object.__setattr__(self, "sampler", OrderSampler(self._order))
        self._delivery = make_delivery(self, checks=self.check_duplicates, device=self.device)
