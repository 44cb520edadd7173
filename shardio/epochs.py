"""Who is told the epoch: the one search for it, from a loader down to its samplers and datasets."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = ("loader", "batch_sampler", "sampler", "dataset", "datasets")
"""The attributes by which loaders, samplers and datasets hold others. Torch's kinds are found under any name."""


def tell_epoch(holder: Any, epoch: int, *, except_for: tuple[type, ...] = ()) -> None:
    """Give an epoch's number to a loader, or to whatever within it takes the number.

    Args:
        holder: A loader, a sampler or a dataset.
        epoch: The number.
        except_for: Classes whose objects are not told.
    """
    if callable(getattr(holder, "set_epoch", None)):
        if not isinstance(holder, except_for):
            holder.set_epoch(epoch)
    else:
        tell_parts(holder, epoch, except_for=except_for)


def tell_parts(holder: Any, epoch: int, *, except_for: tuple[type, ...] = ()) -> None:
    """Give an epoch's number to what is within a loader, a sampler or a dataset, and takes it.

    What has a ``set_epoch`` is told, once, and is trusted to tell what is within it. Of anything else all parts are
    searched: wrapped loaders, samplers within batch samplers, datasets within torch's Subset, ConcatDataset and
    ChainDataset, and within other people's datasets.
    """
    for taker in list(_find_within(holder, except_for, set())):
        taker.set_epoch(epoch)


def _find_within(holder: Any, except_for: tuple[type, ...], seen: set[int]) -> Iterator[Any]:
    """Yield what takes the epoch within ``holder``."""
    seen.add(id(holder))
    for part in _parts(holder):
        if id(part) in seen:
            continue
        if callable(getattr(part, "set_epoch", None)):
            seen.add(id(part))
            if not isinstance(part, except_for):
                yield part
        else:
            yield from _find_within(part, except_for, seen)


def _parts(holder: Any) -> Iterator[Any]:
    kinds = _torchs_kinds()
    attributes = getattr(holder, "__dict__", {})
    for name, value in {**attributes, **{name: getattr(holder, name, None) for name in NAMES}}.items():
        several = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(several, list | tuple):
            # The first one tells of which kind they are: a list of a dataset's paths may be long.
            yield from several if several and isinstance(several[0], kinds) else ()
        elif isinstance(value, kinds) or (name in NAMES and value is not None):
            yield value


def _torchs_kinds() -> tuple[type, ...]:
    torchs = sys.modules.get("torch.utils.data")  # Without torch there is nothing of its kinds.
    return () if torchs is None else (torchs.DataLoader, torchs.Dataset, torchs.Sampler)
