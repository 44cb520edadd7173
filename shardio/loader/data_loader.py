"""DataLoader: torch's DataLoader with shardio's workers, a resumable state and, for shardio's datasets, their order."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.utils.data

from shardio.bad_samples import OnError
from shardio.datasets import MapDataset, Ordered
from shardio.device.prefetcher import DecodePlace
from shardio.epochs import set_epoch, set_epoch_of_parts
from shardio.errors import Stage
from shardio.libraries import own_tensors
from shardio.loader.assembly import DefaultPrefetch
from shardio.loader.batches import collate_channels_last, yields_images
from shardio.loader.buffers import MemoryCallback
from shardio.loader.choice import OwnArguments, check_dataset, check_prefetch_factor, fallback_reason, is_torchs
from shardio.loader.epoch_iterator import is_preparing
from shardio.loader.extension import DeliveredBatches, Extension, Shown, extend, find_extension
from shardio.loader.fetch_job import WorkerMethod
from shardio.loader.saved_state import takes_arguments
from shardio.loader.statistics import LoaderStats, describe_format
from shardio.order import check_epoch
from shardio.values import check_integer, check_optional_integer

NO_STATS = "per-stage timings are not available, because shardio's own code does not read these samples: {reason}"

NO_STATE = (
    "this loader has no state, because torch's own iterators make its batches: its saved state is empty, so a resumed "
    "run restarts the epoch"
)


_UNKNOWN = "{kind} did not call the constructor of shardio's DataLoader, so torch's own iterators make its batches"

_log = logging.getLogger("shardio")


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _Batch = TypeVar("_Batch", covariant=True, default=Any)
else:
    from typing import TypeVar

    _Batch = TypeVar("_Batch", covariant=True)


def _has_order(loader: Any) -> bool:
    """Whether the order of the samples is shardio's."""
    extension = find_extension(loader)
    return extension is not None and extension.order is not None


def _has_state(loader: Any) -> bool:
    """Whether the loader can save its position."""
    if (extension := _find_stateful(loader)) is None:
        return False
    parts = (loader.dataset, loader.sampler, loader.batch_sampler)
    return extension.order is not None or not any(map(takes_arguments, parts))


def _calls_dataset(loader: Any) -> bool:
    """Whether the dataset's own methods make the samples, instead of shardio's own, faster code."""
    return _fallback_reason(loader) is not None


class DataLoader(torch.utils.data.DataLoader[_Batch]):
    """torch's DataLoader, extended with a resumable state, shardio's workers and shardio's order.

    The class can replace torch's DataLoader in any program: see docs/speed-up.md. With a :class:`shardio.ShardDataset`,
    or a :class:`shardio.EpochSampler` as ``sampler``, the loader uses shardio's order. With this order, every ``iter``
    begins the next epoch (unless ``set_epoch`` sets another), ``drop_last=True`` means ``remainder="drop"``, and the
    state fits any number of ranks and workers. Otherwise, torch determines the order and the state is that of
    torchdata's StatefulDataLoader. This also applies to subclasses of EpochSampler that override ``__iter__`` or
    ``__len__``: call ``set_epoch`` before each epoch, as with torch's samplers.

    Images that shardio's datasets and transforms produce are delivered as uint8 tensors [N, 3, H, W] in the
    channels_last memory format.

    >>> loader = DataLoader(ShardDataset("out", shuffle=True), batch_size=128)  # doctest: +SKIP
    >>> for images, labels in loader: ...  # doctest: +SKIP

    On Linux, shardio's worker processes decode shardio's datasets (and subclasses that override nothing), and torch's
    Subsets and ConcatDatasets of shardio's map-style datasets. The transform and ``collate_fn`` must be picklable, and
    ``batch_size=None``, ``worker_init_fn`` and ``multiprocessing_context`` must not be used. There are ``num_workers``
    processes or, with few processors, fewer processes with ``num_workers`` threads in total. Otherwise, as in torch,
    workers have a copy of the dataset and call its methods.

    All workers write to memory that is reused when a batch is freed, so its tensors cannot be enlarged in place. With
    shardio's datasets, the first sample's rng key seeds the generators of torch, numpy and Python before your
    ``collate_fn`` is called, unless the dataset has ``seed_transforms=False``.

    All arguments not listed here are those of ``torch.utils.data.DataLoader``.

    Args:
        prefetch_factor: In shardio's worker processes, the number of batches that all workers together prepare in
            advance. By default 2, or more if batches are too small to keep all workers busy.
        worker_method: Whether workers that call the dataset are processes, or threads that share it. Threads copy and
            pickle nothing; see :func:`shardio.get_worker_info`.
        snapshot_every_n_steps: The number of batches after which workers report the state of an iterable dataset; with
            0, only at the beginning. A resumed run rereads the batches that followed the last report.
        on_error: The treatment of samples of a map-style dataset that cannot be read or decoded. ``raise`` raises an
            error that names the sample. ``replace`` uses another sample from the same dataset or Subset. The choice
            depends on the sample and, in shardio's datasets, on the seed and the epoch. ``skip`` leaves the sample out,
            so the batch is smaller; a batch that would be empty raises an error. At the end of an epoch, a
            RuntimeWarning reports how many samples were replaced or skipped.
        on_error_in: The stages whose errors are treated as errors of a sample: ``read``, ``decode`` (including your own
            decoders), and ``transform`` (your own ``transform`` or ``transform_sample``). Any other error is raised. In
            datasets that are not shardio's, all errors of ``__getitem__`` count as ``read`` errors.
        quarantine: The file that logs replaced and skipped samples, one JSON object per line. The constructor checks
            that the file can be written; the first entry creates the file.
        check_duplicates: Whether to raise an error when an epoch repeats a sample; see :func:`shardio.check.guard`.
        device: The device to which :class:`shardio.DevicePrefetcher` copies batches; by default, they stay on the CPU.
        decode: Where images are decoded: by the ``workers``, or, if they were packed with ``--jpeg tile``, on the
            ``device``; see DevicePrefetcher.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If arguments contradict each other or the dataset, or the quarantine file cannot be written.
    """

    dataset: Any
    sampler: Any
    batch_sampler: Any

    has_order = Shown(_has_order)
    has_state = Shown(_has_state)
    calls_dataset = Shown(_calls_dataset)
    use_stateful_dataloader = Shown(_has_order)  # If true, Accelerate's save_state includes the loader's state.

    counts_when_received = True
    """Batches are counted when the user receives them, not when a prefetcher requests them."""

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
        decode: DecodePlace = "workers",
    ) -> None:
        check_dataset(dataset, shuffle=shuffle, drop_last=drop_last)
        batch_size = check_optional_integer("batch_size", batch_size, at_least=1)
        num_workers = check_integer("num_workers", num_workers)  # torch checks the rest.
        prefetch_factor = check_prefetch_factor(prefetch_factor)
        arguments = OwnArguments(
            worker_method=worker_method,
            snapshot_every_n_steps=snapshot_every_n_steps,
            on_error=on_error,
            on_error_in=on_error_in,
            quarantine=quarantine,
            check_duplicates=check_duplicates,
            device=device,
            decode=decode,
        )
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
        if collate_fn is None and self._auto_collation and yields_images(dataset):
            self.collate_fn = collate_channels_last
        extend(self, arguments)

    def __len__(self) -> int:
        """Return the number of this rank's batches in a full epoch."""
        extension = find_extension(self)
        if extension is None or extension.order is None:
            return super().__len__()
        return extension.count_batches(batch_size=self.batch_size, drop_last=self.drop_last)

    def __iter__(self) -> Any:
        """Begin the next epoch and return an iterator over its batches."""
        extension = find_extension(self)
        if extension is None or (extension.delivery is None and extension.order is None):
            return super().__iter__()  # With multiple inheritance, the next class may not be torch's.
        if extension.delivery is None:
            return extension.iterate(self)
        return DeliveredBatches(extension.delivery, self, extension.find_length(self))

    def _get_iterator(self) -> Any:
        """Begin the next epoch and return a new iterator; torch's ``__iter__`` calls this."""
        if (extension := find_extension(self)) is None:
            _log.info(_UNKNOWN.format(kind=type(self).__name__))
            return super()._get_iterator()
        if self.num_workers > 0:
            self.check_worker_number_rationality()
        return extension.make_iterator(self)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter``.

        Setting the epoch of a loaded state keeps the loaded position; setting a different epoch drops the position.
        Without shardio's order, the loaded epoch is known only if the sampler has a ``set_epoch`` method. If the loaded
        epoch is unknown, setting any epoch keeps the position.

        An epoch in progress continues, and ``state_dict`` describes it until the next ``iter``. The method also calls
        ``set_epoch`` on other samplers and datasets.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If ``epoch`` is negative or not below 2**62.
        """
        epoch = check_epoch(epoch)
        extension = find_extension(self)
        # shardio's map-style datasets have no order, and may serve several loaders.
        if extension is not None and extension.order is not None:
            extension.order.update_counter().set_epoch(epoch)
            set_epoch(self.dataset, epoch, skip=(MapDataset, Ordered))
            return
        if extension is not None:
            extension.epochs.set_epoch(epoch)
        set_epoch_of_parts(self, epoch, skip=(MapDataset,))

    def state_dict(self) -> dict[str, Any]:
        """Return the user's position in the epoch.

        With shardio's order, the state is a small JSON-serializable dict that fits any number of ranks and workers.
        Otherwise, it has the keys of torchdata's StatefulDataLoader, with the states of the dataset, the sampler and
        their iterators if they have any. If torch's own iterators make the batches, the state is empty. Returning an
        empty state causes a RuntimeWarning, not an error, because frameworks save the state of every loader that has
        this method.

        Raises:
            StateError: If the ``state_dict`` of the dataset, the sampler or an iterator fails or requires arguments.
        """
        if (extension := _find_stateful(self)) is not None:
            return extension.dump(self)
        warnings.warn(NO_STATE, RuntimeWarning, stacklevel=2)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state at the next ``iter``.

        An empty state, from a loader without a state, restarts the epoch.

        Raises:
            StateError: If the state belongs to a different dataset, order or kind of loader; the message names the
                differences.
            TypeError: If torch's own iterators make the batches, and the state is not empty.
        """
        if (extension := _find_stateful(self)) is not None:
            extension.load(self, state)
            return
        if state:
            raise TypeError(
                f"a loader without a state cannot load one: {type(self.dataset).__name__} needs torch's iterators"
            )
        warnings.warn(NO_STATE, RuntimeWarning, stacklevel=2)

    def watch_memory(
        self, callback: MemoryCallback, *, num_held: int = 0, takes_tiles: bool = False
    ) -> AbstractContextManager[None]:
        """Call a function once for each piece of memory used by batches of epochs that begin in the context.

        Batches of other epochs use different memory.

        Args:
            callback: Receives the memory as a uint8 [n] array, and must not keep a reference to it.
            num_held: The number of batches that the caller holds at a time, in addition to those that it has passed on.
                The loader provides memory for these additional batches.
            takes_tiles: Whether the caller decodes images: where that is possible, batches hold objects with a
                ``decode`` method instead of images.
        """
        return _find_own(self).watch_memory(callback, num_held=num_held, takes_tiles=takes_tiles)

    def start_workers(self) -> None:
        """Start the next epoch's worker processes now instead of when it begins, for example before building a model.

        The method does not wait for the processes. The method does nothing if the processes are already running, if
        there are no workers, or if the dataset's own methods make the samples.
        """
        with own_tensors():
            _find_own(self).find_executor(self).start_workers()

    def stats(self, *, trace: str | os.PathLike[str] | None = None) -> LoaderStats:
        """Return the counts and times since ``iter(loader)`` was last called; ``print`` shows them as a table.

        Args:
            trace: A file that receives a record of what the workers did and when the training process waited, for the
                latest 10,000 chunks and batches. Open the file at https://ui.perfetto.dev.

        Raises:
            OSError: If the trace cannot be written.
            TypeError: If torch's own iterators, which do not time the stages, make the batches. These iterators
                make the batches of torch's datapipes and, on systems other than Linux, all batches of worker processes.
        """
        if (tally := _find_own(self).find_executor(self).tally) is None:
            raise TypeError(NO_STATS.format(reason=fallback_reason(self)))
        if trace is not None:
            tally.write_trace(trace)
        is_ours = fallback_reason(self) is None
        return replace(tally.sum_up(), stored=describe_format(self.dataset) if is_ours else None)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether the loader works without Accelerate's wrappers. Accelerate's ``prepare`` reads this attribute."""
        extension = find_extension(self)
        has_order = extension is not None and extension.order is not None
        if extension is not None and has_order and is_preparing():
            extension.is_in_accelerate = True  # Accelerate sets the attribute only in ``prepare``.
        return has_order

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, is_prepared: bool) -> None:
        pass  # A prepared loader stays prepared.

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        if "_iterator" in state:
            state["_iterator"] = None  # A copy starts its own workers.
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        find_extension(self)  # The copy gets its own extension.


def _find_own(loader: Any) -> Extension:
    """Return a loader's extension.

    Raises:
        TypeError: If the loader's class did not call the constructor of shardio's DataLoader.
    """
    if (extension := find_extension(loader)) is None:
        raise TypeError(_UNKNOWN.format(kind=type(loader).__name__))
    return extension


def _find_stateful(loader: Any) -> Extension | None:
    extension = find_extension(loader)
    if extension is None or (extension.order is None and is_torchs(loader, extension.arguments.worker_method)):
        return None
    return extension


def _fallback_reason(loader: Any) -> str | None:
    return _UNKNOWN.format(kind=type(loader).__name__) if find_extension(loader) is None else fallback_reason(loader)
