"""The extension of torch's DataLoader: arguments, order, state and executor, in one attribute."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Generic, TypeVar, overload

from shardio.bad_samples import BadSamples
from shardio.datasets import TOO_LATE
from shardio.device import DevicePrefetcher
from shardio.libraries import own_tensors
from shardio.loader.batches import yields_images
from shardio.loader.buffers import BufferWatch, MemoryCallback
from shardio.loader.choice import (
    OwnArguments,
    check_order,
    check_policy,
    check_samplers_dataset,
    fallback_reason,
    find_settings,
    is_torchs,
    make_bad_samples,
    make_executor,
    sole_split,
    warn_of_no_batches,
    warn_of_whole_epochs,
)
from shardio.loader.epoch_iterator import (
    BegunEpoch,
    EpochIterator,
    LoaderIterator,
    PreparedEpoch,
    check_parallelism,
    make_epoch_iterator,
)
from shardio.loader.executor import (
    SUPERSEDED,
    Executor,
    ExecutorSettings,
    OrderSampler,
    TorchDataLoader,
    find_order,
    find_override,
    find_transformed,
)
from shardio.loader.sampler_epochs import Epochs
from shardio.order import DROP_LAST, Cursor, Progress, Split

_READ = ("dataset", "batch_size", "sampler", "batch_sampler", "collate_fn", "num_workers")
"""Attributes of a loader that wrappers read during an epoch."""

_log = logging.getLogger("shardio")

_NAME = "_shardio"
"""The only attribute that shardio adds to a loader, apart from the arguments."""

Value = TypeVar("Value")


class Extension:
    """The state that shardio keeps for a loader.

    The extension holds only a weak reference to the loader. Iterators hold the extension. So a loader that keeps its
    own iterator is not part of a reference cycle, and its workers end when the last reference to the loader is dropped.

    Args:
        loader: The loader, whose attributes torch has set.
        arguments: The arguments that torch's loader does not have.

    Attributes:
        owner: Returns the loader; None if the loader was freed, or if this is the extension of a copy.
        arguments: The arguments that torch's loader does not have.
        order: The loader's order; None if the order is not shardio's.
        epochs: The positions at which the loader's epochs begin, if the order is not shardio's.
        delivery: The wrapper around the loader's batches; None if the arguments require no wrapper.
        is_in_accelerate: Whether Accelerate has prepared the loader.
        bad_samples: The policy for unreadable samples; None raises their errors.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If arguments contradict each other or the dataset, or the quarantine file cannot be written.
    """

    def __init__(self, loader: Any, arguments: OwnArguments) -> None:
        self.arguments = arguments
        self.owner: Callable[[], Any] = weakref.ref(loader)
        self.order = find_order(loader)
        self.epochs = Epochs()
        self.is_in_accelerate = False
        self._latest: object = None  # A token for the latest epoch.
        self._persistent: Callable[[], EpochIterator | None] = _none  # The iterator whose workers persist.
        self._warned_of = set[Split]()  # The splits already warned of, because they have no batches.
        self._made: tuple[ExecutorSettings, Executor] | None = None  # The latest executor, and its settings.
        self._watches: list[BufferWatch] = []  # The watches of the next epoch.
        check_samplers_dataset(loader.dataset, _find_drawing_sampler(loader), compares_digests=True)
        check_policy(
            arguments.on_error,
            loader.dataset,
            has_order=self.order is not None,
            has_batches=loader.batch_sampler is not None,
            is_fetched=not is_torchs(loader, arguments.worker_method),
            obstacle=fallback_reason(loader),
        )
        self.bad_samples: BadSamples | None = make_bad_samples(
            arguments.on_error, arguments.on_error_in, arguments.quarantine, loader.dataset
        )
        if self.order is not None:
            ordered = self.order.ordered
            check_order(ordered, batch_size=loader.batch_size, drop_last=loader.drop_last, in_order=loader.in_order)
            if loader.dataset is ordered:
                self._set_sampler(loader)
            ordered.has_loader = True  # Set this last, so that a rejected loader leaves its sampler unchanged.
        self.delivery = make_delivery(loader, self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy starts its own workers.
        return {
            **self.__dict__,
            "owner": _none,
            "delivery": None,
            "_latest": None,
            "_persistent": _none,
            "_made": None,
            "_watches": [],
        }

    def copy_for(self, loader: Any) -> Extension:
        """Return an extension for a copy of the loader. The original stays usable."""
        extension = copy.copy(self)
        extension.owner = weakref.ref(loader)
        extension.epochs = copy.deepcopy(self.epochs)
        if extension.order is not None:
            extension.order = extension.order.copy()
            if isinstance(loader.sampler, OrderSampler):
                extension._set_sampler(loader)
        extension.delivery = make_delivery(loader, extension)
        return extension

    def _set_sampler(self, loader: Any) -> None:
        assert self.order is not None, "the caller checked"
        # torch's loader forbids setting the sampler, but only frameworks read this sampler.
        vars(loader)["sampler"] = OrderSampler(self.order)

    def iterate(self, loader: Any) -> Any:
        """Begin the loader's next epoch and return an iterator over its batches, on the CPU."""
        # As in torch, persistent workers have a single iterator object. In shardio's order, each iterator has an
        # epoch of its own.
        return TorchDataLoader.__iter__(loader) if self.order is None else loader._get_iterator()

    def make_iterator(self, loader: Any) -> Any:
        """Begin the loader's next epoch and return a new iterator, regardless of the loader's overrides."""
        persists = self.order is None and loader.persistent_workers and loader.num_workers > 0
        if persists and self._persistent() is not None:
            self._made = None  # As in torch, an additional iterator has its own workers.
        iterator = make_epoch_iterator(self._begin, loader, owns_workers=persists)
        if persists:
            self._persistent = weakref.ref(iterator)
        return PreparedEpoch(iterator) if self.is_in_accelerate and self.order is not None else iterator

    def find_executor(self, loader: Any) -> Executor:
        """Return the executor for the loader's current attributes, which may be set at any time."""
        settings = find_settings(loader, self.arguments)
        if self._made is None or not settings.is_same(self._made[0]):
            made = make_executor(loader, settings, self.order, self.epochs, self.bad_samples, self._watches)
            self._made = settings, made
        return self._made[1]

    def split(self, cursor: Cursor, *, batch_size: int | None, drop_last: bool) -> Split:
        """Return this rank's share of an epoch in shardio's order, from a cursor to the end."""
        assert self.order is not None, "the caller checked"
        ordered = self.order.ordered
        remainder = DROP_LAST if drop_last else ordered.remainder
        return ordered.split(cursor, batch_size=batch_size or 1, remainder=remainder)

    def count_batches(self, *, batch_size: int | None, drop_last: bool) -> int:
        """Return the number of this rank's batches in a full epoch of shardio's order."""
        return self.split(Cursor(epoch=0), batch_size=batch_size, drop_last=drop_last).num_batches

    def find_length(self, loader: Any, sampler: Any = None) -> Callable[[], int]:
        """Return a function that returns the length of the loader's iterators, without needing the loader.

        Args:
            loader: The loader.
            sampler: The sampler that the iterators draw from; by default, the loader's ``_index_sampler``.
        """
        if self.order is None:
            # Do not use the loader's length: as in torch, iterators do not request the length of an iterable dataset.
            return partial(len, loader._index_sampler if sampler is None else sampler)
        return partial(self.count_batches, batch_size=loader.batch_size, drop_last=loader.drop_last)

    def dump(self, loader: Any) -> dict[str, Any]:
        """Return the user's position."""
        if self.order is None:
            return self.epochs.dump(loader)
        return self.order.ordered.dump_cursor(self.order.update_counter().now)

    def load(self, loader: Any, state: dict[str, Any]) -> None:
        """Begin the next epoch at the position of a state.

        Raises:
            StateError: If the state does not match the loader.
        """
        if self.order is None:
            self.epochs.load(loader, state)
        else:
            self.order.update_counter().load(self.order.ordered.read_cursor(state))

    @contextmanager
    def watch_memory(self, callback: MemoryCallback, *, num_held: int = 0, takes_tiles: bool = False) -> Iterator[None]:
        """Call a function with the memory of each epoch that begins in the block; see DataLoader.watch_memory."""
        # A guard against duplicates compares pixels.
        takes_tiles = takes_tiles and not self.arguments.check_duplicates
        thread_id = threading.get_ident()
        watch = BufferWatch(callback=callback, num_held=num_held, takes_tiles=takes_tiles, thread_id=thread_id)
        self._watches.append(watch)
        try:
            yield
        finally:
            self._watches.remove(watch)

    def _begin(self, loader: Any, sampler: Any, *, made: Any) -> BegunEpoch:
        """Begin an epoch, and count it only after all other steps have succeeded.

        Args:
            loader: The loader.
            sampler: The loader's ``_index_sampler``.
            made: The executor of the iterator's previous epoch, and its settings; None for the iterator's first epoch.
        """
        if made is not None:
            self._made = made  # Each of several iterators with persistent workers has an executor of its own.
        dataset, order = loader.dataset, self.order
        with own_tensors():
            check_samplers_dataset(dataset, _find_drawing_sampler(loader))
            cursor, split = self.find_start(loader)
            executor = self.find_executor(loader)
        self.epochs.keeps_seed = made is not None
        if self.is_in_accelerate and split is not None:
            check_parallelism(split)
        has_own_modes = yields_images(dataset)  # User code runs in the torch modes that the user set.
        self.epochs.sampler = sampler
        try:
            with own_tensors() if has_own_modes else nullcontext():
                batches = executor.start(cursor, split)
        finally:
            self.epochs.sampler = None
        transformed, persists, token = find_transformed(dataset), loader.persistent_workers, object()
        decoder = None if transformed is None else transformed.decoder
        self._latest = token

        def is_latest() -> bool:
            return order is None or self._latest is token

        def check() -> None:
            if transformed is not None and transformed.decoder is not decoder:
                raise RuntimeError(TOO_LATE)
            if persists and not is_latest():
                raise RuntimeError(SUPERSEDED)

        progress = None if cursor is None or split is None else Progress(cursor=cursor, split=split)
        epoch = BegunEpoch(
            made=self._made,
            batches=batches,
            check=check,
            is_latest=is_latest,
            modes=own_tensors if has_own_modes or progress is not None else nullcontext,
            progress=progress,
            seed=self.epochs.base_seed if order is None else order.ordered.seed,
            length=self.find_length(loader, sampler),
        )
        if order is not None and progress is not None:
            counter = order.update_counter()
            counter.start(order.ordered.num_all_samples)
            counter.progress = progress
        return epoch

    def find_start(self, loader: Any) -> tuple[Cursor | None, Split | None]:
        """Return the next epoch's start and this rank's share; both are None if the order is not shardio's."""
        if self.order is None:
            self._warn_of_sampler(loader)
            return None, None
        cursor = self.order.update_counter().find_start(self.order.ordered.num_all_samples)
        split = self.split(cursor, batch_size=loader.batch_size, drop_last=loader.drop_last)
        if not split.num_batches and not cursor.position:
            warn_of_no_batches(split, self._warned_of)
        return cursor, split

    def _warn_of_sampler(self, loader: Any) -> None:
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        warn_of_whole_epochs(loader.dataset, sampler)
        if (
            loader.drop_last
            and yields_images(loader.dataset)
            and hasattr(loader.sampler, "__len__")
            and not TorchDataLoader.__len__(loader)
        ):
            share = sole_split(len(loader.sampler), loader.batch_size)
            warn_of_no_batches(share, self._warned_of)


def find_extension(loader: Any) -> Extension | None:
    """Return a loader's extension; None if its class did not call the constructor of shardio's DataLoader."""
    extension: Extension | None = vars(loader).get(_NAME)
    if extension is None:
        return None
    if extension.owner() is not loader:  # The loader is a copy of another loader.
        extension = vars(loader)[_NAME] = extension.copy_for(loader)
    if extension.order is not None and (why := find_override(loader)) is not None:
        _log.info("this loader does not have shardio's order, because %s", why)
        extension.order = None
    return extension


def extend(loader: Any, arguments: OwnArguments) -> None:
    """Create a loader's extension.

    Arguments that the user passed become attributes of the loader, for frameworks that re-create it. A subclass may use
    the names of the arguments for something else, so shardio itself never reads these attributes.
    """
    vars(loader)[_NAME] = Extension(loader, arguments)
    for name, value in arguments.passed.items():
        vars(loader).setdefault(name, value)


def _find_drawing_sampler(loader: Any) -> Any:
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


def _none() -> None:
    """Return None, as a dead weak reference does."""


class Shown(Generic[Value]):
    """A read-only attribute of a loader that, unlike a property, lets subclasses and programs reuse its name.

    Args:
        find: Returns the attribute's value for a loader.
    """

    def __init__(self, find: Callable[[Any], Value]) -> None:
        self._find = find
        self.__doc__ = find.__doc__

    @overload
    def __get__(self, loader: None, owner: type) -> Shown[Value]: ...
    @overload
    def __get__(self, loader: object, owner: type) -> Value: ...
    def __get__(self, loader: object, owner: type) -> Shown[Value] | Value:
        return self if loader is None else self._find(loader)


def make_delivery(loader: Any, extension: Extension) -> Iterable[Any] | None:
    """Return the wrapper around a loader's batches; None if the user's arguments require no wrapper.

    Args:
        loader: The loader.
        extension: The loader's extension, which holds the user's arguments.

    Raises:
        ValueError: If the device is not available.
        ImportError: See DevicePrefetcher.
    """
    arguments = extension.arguments
    if not arguments.check_duplicates and arguments.device is None:
        return None
    batches: Iterable[Any] = MadeBatches(loader, extension)
    if arguments.check_duplicates:
        from shardio.check import guard

        batches = guard(batches)
    return batches if arguments.device is None else DevicePrefetcher(batches, arguments.device, decode=arguments.decode)


class MadeBatches:
    """A loader's batches as its executor makes them: the input of the wrappers that the loader's extension holds.

    An instance has the loader's attributes, but its methods call the extension, not the loader, because subclasses of
    the loader may use the same names.

    Args:
        loader: The loader.
        extension: The loader's extension.
    """

    counts_when_received = True

    def __init__(self, loader: Any, extension: Extension) -> None:
        # Hold weak references, so that workers end as soon as the loader is released.
        self._loader, self._extension = weakref.ref(loader), weakref.ref(extension)
        self._attributes: dict[str, Any] = {}  # The loader's attributes, for an epoch that outlives the loader.

    def __iter__(self) -> Iterator[Any]:
        loader = self._find()
        self._attributes = {name: getattr(loader, name) for name in _READ}
        batches: Iterator[Any] = self._find_extension().iterate(loader)
        return batches

    def __len__(self) -> int:
        return len(self._find())

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_extension", "_attributes"):  # During unpickling, these attributes are not set yet.
            raise AttributeError(name)
        if (loader := self._loader()) is None and name in self._attributes:
            return self._attributes[name]
        return getattr(loader, name)

    def watch_memory(self, callback: MemoryCallback, **options: Any) -> AbstractContextManager[None]:
        """Call a function with the memory of each epoch that begins in the block; see DataLoader.watch_memory."""
        return self._find_extension().watch_memory(callback, **options)

    def state_dict(self) -> dict[str, Any]:
        """Return the user's position."""
        return self._find_extension().dump(self._find())

    def _find(self) -> Any:
        loader = self._loader()
        assert loader is not None, "the loader exists until its first batch"
        return loader

    def _find_extension(self) -> Extension:
        extension = self._extension()
        assert extension is not None, "the loader keeps it"
        return extension


class DeliveredBatches(LoaderIterator):
    """An iterator over a wrapper's batches. This iterator keeps the loader alive until its first batch.

    Args:
        delivery: The wrapper.
        loader: The loader.
        length: Returns the number of this rank's batches in a full epoch.
    """

    def __init__(self, delivery: Iterable[Any], loader: Any, length: Callable[[], int]) -> None:
        self._delivery, self._length = delivery, length
        self._loader = weakref.ref(loader)
        self._reset(loader, first_iter=True)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self._batches: Any = iter(self._delivery)
        self._begins: Any = loader
        self._adopt(loader, loader._index_sampler)

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._begins = None
        self._num_yielded += 1
        return batch

    def __len__(self) -> int:
        return self._length()

    def _shutdown_workers(self) -> None:
        """End the epoch and stop its workers. Frameworks call this."""
        self._batches.close()
        if (loader := self._loader()) is not None and loader._iterator is not None:
            loader._iterator._shutdown_workers()
