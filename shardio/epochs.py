"""Set the epoch of a loader, once on each part that accepts one, such as a sampler or a dataset."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

MAX_EPOCH = 2**62
"""Epochs are below this, so that later ones also fit in 64 bits."""

NAMES = ("loader", "batch_sampler", "sampler", "dataset", "datasets")
"""Attributes that hold parts of a loader, sampler or dataset. Parts of torch's classes are found under any name."""


def set_epoch(holder: Any, epoch: int, *, skip: tuple[type, ...] = ()) -> None:
    """Set the epoch of a loader, a sampler or a dataset, or of its parts if it has no ``set_epoch``.

    Args:
        holder: The loader, sampler or dataset.
        epoch: The epoch.
        skip: Classes whose instances keep their epoch.
    """
    if not _takes_epoch(holder):
        set_epoch_of_parts(holder, epoch, skip=skip)
    elif not isinstance(holder, skip):
        holder.set_epoch(epoch)


def set_epoch_of_parts(holder: Any, epoch: int, *, skip: tuple[type, ...] = ()) -> None:
    """Set the epoch of the parts of a loader, a sampler or a dataset.

    A part that has ``set_epoch`` is called once and passes the epoch on to its own parts. All other parts are searched:
    wrapped loaders, samplers in batch samplers, datasets in torch's Subset, ConcatDataset and ChainDataset, and
    datasets in user-defined datasets.
    """
    for part in list(_find_takers(holder, skip, set())):
        part.set_epoch(epoch)


def _takes_epoch(holder: Any) -> bool:
    return callable(getattr(holder, "set_epoch", None))


def _find_takers(holder: Any, skip: tuple[type, ...], seen: set[int]) -> Iterator[Any]:
    """Yield the outermost parts of ``holder`` that have ``set_epoch``."""
    seen.add(id(holder))
    for part in _parts(holder):
        if id(part) in seen:
            continue
        if not _takes_epoch(part):
            yield from _find_takers(part, skip, seen)
            continue
        seen.add(id(part))
        if not isinstance(part, skip):
            yield part


def _parts(holder: Any) -> Iterator[Any]:
    classes = _torch_classes()
    attributes = getattr(holder, "__dict__", {})
    for name, value in {**attributes, **{name: getattr(holder, name, None) for name in NAMES}}.items():
        several = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(several, list | tuple):
            # Only the first item is checked, because a dataset's list of paths may be long.
            yield from several if several and isinstance(several[0], classes) else ()
        elif isinstance(value, classes) or (name in NAMES and value is not None):
            yield value


def _torch_classes() -> tuple[type, ...]:
    torch_data = sys.modules.get("torch.utils.data")  # If torch is not loaded, nothing is an instance of its classes.
    if torch_data is None:
        return ()
    # Programs replace DataLoader in torch by shardio's subclass.
    loaders = [each for each in torch_data.DataLoader.__mro__ if each.__name__ == "DataLoader"]
    return loaders[-1], torch_data.Dataset, torch_data.Sampler
