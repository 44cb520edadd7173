"""What a loader does with its batches if the user asks: check them for repeats, and copy them to a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardio.device import DevicePrefetcher
from shardio.loader.epoch_iterator import LoaderIterator
from shardio.loader.slots.slot_pool import MemoryCallback

if TYPE_CHECKING:
    from shardio.loader.extension import Extension


_READ = ("dataset", "batch_size", "sampler", "batch_sampler", "collate_fn", "num_workers")
"""Attributes of a loader that wrappers read during an epoch."""


class MadeBatches:
    """A loader's batches as its executor makes them, for wrappers that the loader's extension holds.

    It has the attributes of the loader. What wrappers need of shardio comes from the extension, because subclasses of
    the loader may use the names.

    Args:
        loader: The loader.
        extension: Its extension.
    """

    counts_when_received = True

    def __init__(self, loader: Any, extension: Extension) -> None:
        # Weak, so that workers end as soon as the loader is released.
        self._loader, self._extension = weakref.ref(loader), weakref.ref(extension)
        self._attributes: dict[str, Any] = {}  # Of the loader, for an epoch that outlives it.

    def __iter__(self) -> Iterator[Any]:
        loader = self._find()
        self._attributes = {name: getattr(loader, name) for name in _READ}
        batches: Iterator[Any] = self._find_extension().iterate(loader)
        return batches

    def __len__(self) -> int:
        return len(self._find())

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_extension", "_attributes"):  # Not set yet, for example during unpickling.
            raise AttributeError(name)
        if (loader := self._loader()) is None and name in self._attributes:
            return self._attributes[name]
        return getattr(loader, name)

    def watch_memory(self, callback: MemoryCallback, *, num_held: int = 0) -> AbstractContextManager[None]:
        """Call a function for the memory of the epochs that begin in the block; see DataLoader.watch_memory."""
        return self._find_extension().watch_memory(callback, num_held=num_held)

    def state_dict(self) -> dict[str, Any]:
        """Return the user's position."""
        return self._find_extension().dump(self._find())

    def _find(self) -> Any:
        loader = self._loader()
        assert loader is not None, "the loader lives until its first batch"
        return loader

    def _find_extension(self) -> Extension:
        extension = self._extension()
        assert extension is not None, "the loader keeps it"
        return extension


class DeliveredBatches(LoaderIterator):
    """An iterator over the batches of a wrapper. It keeps the loader alive until the first batch begins the epoch.

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
        """Begin the loader's next epoch."""
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
        """End the epoch and its workers. Frameworks call this."""
        self._batches.close()
        if (loader := self._loader()) is not None and loader._iterator is not None:
            loader._iterator._shutdown_workers()


def make_delivery(loader: Any, extension: Extension) -> Iterable[Any] | None:
    """Return the wrapper over a loader's batches; None if the user asked for none.

    Args:
        loader: The loader.
        extension: Its extension, whose arguments say what the user asked for.

    Raises:
        ValueError: If the device is not available.
    """
    arguments = extension.arguments
    if not arguments.check_duplicates and arguments.device is None:
        return None
    batches: Iterable[Any] = MadeBatches(loader, extension)
    if arguments.check_duplicates:
        from shardio.check import guard

        batches = guard(batches)
    return batches if arguments.device is None else DevicePrefetcher(batches, arguments.device)
