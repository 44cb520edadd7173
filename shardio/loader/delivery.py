"""What a loader does with its batches if the user asks: check them for repeats, and copy them to a device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from shardio.device import DevicePrefetcher


class MadeBatches:
    """A loader's batches as its executor makes them, for wrappers that the loader itself holds.

    It has the attributes of the loader.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = weakref.ref(loader)  # Weak, so that workers end as soon as the loader is released.

    def __iter__(self) -> Iterator[Any]:
        batches: Iterator[Any] = self._find()._iterate()
        return batches

    def __len__(self) -> int:
        return len(self._find())

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # Not set yet, for example during unpickling.
            raise AttributeError(name)
        return getattr(self._find(), name)

    def _find(self) -> Any:
        loader = self._loader()
        assert loader is not None, "an iterator of the loader keeps it"
        return loader


class DeliveredBatches:
    """An iterator over the batches of a wrapper. It keeps the loader alive.

    Args:
        delivery: The wrapper.
        loader: The loader.
    """

    def __init__(self, delivery: Iterable[Any], loader: Any) -> None:
        self._batches, self._loader = iter(delivery), loader

    def __iter__(self) -> DeliveredBatches:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._loader)


def make_delivery(loader: Any, *, checks: bool, device: str | torch.device | None) -> Iterable[Any] | None:
    """Return the wrapper over a loader's batches; None if the user asked for none.

    Args:
        loader: The loader.
        checks: Whether repeats raise an error.
        device: Where batches are delivered; None leaves them where they are.

    Raises:
        ValueError: If the device is not available.
    """
    if not checks and device is None:
        return None
    batches: Iterable[Any] = MadeBatches(loader)
    if checks:
        from shardio.check import guard

        batches = guard(batches)
    return batches if device is None else DevicePrefetcher(batches, device)
