"""Checks that an epoch is split over ranks only once.

Frameworks wrap loaders and datasets in objects that give each process a part of the samples. If a dataset or sampler
already yields its rank's share, a second split would lose samples. The wrapper does not announce itself, so this module
looks for it among the callers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from shardio.world import World

_METHODS = frozenset({"__iter__", "__len__", "set_epoch"})
"""The methods in which a wrapper calls what it wraps. Only the local variables of their frames are read: reading those
of a training loop would keep a batch alive."""

_SHARDS = frozenset({"IterableDatasetShard", "BatchSamplerShard"})
"""Classes of Accelerate and Transformers that give each process a part of what they wrap."""

_SKIPPERS = frozenset({"SkipBatchSampler", "SkipDataLoader"})
"""Classes that ``accelerate.skip_first_batches`` creates."""


def refuse_second_split(order: Any, world: World, *, has_loader: bool, gives_order: bool) -> None:
    """Check that no caller splits the samples of ``order`` again, or skips batches through a rebuilt loader.

    Args:
        order: The dataset or sampler that takes its rank's share.
        world: The rank and world size of that share.
        has_loader: Whether it belongs to a shardio.DataLoader.
        gives_order: Whether a shardio.DataLoader over it is not split again.

    Raises:
        RuntimeError: If a caller does; the message names the caller and the remedy.
    """
    name = type(order).__name__
    for caller in find_callers():
        kind = f"{type(caller).__module__}.{type(caller).__name__}"
        if has_loader and type(caller).__name__ in _SKIPPERS:
            raise RuntimeError(
                f"{kind} reads the {name} through its own loader, which does not know the epoch or the batches of the "
                "shardio.DataLoader that it was created from: to resume, call load_state_dict() on the "
                "shardio.DataLoader instead of using skip_first_batches(). See docs/frameworks.md"
            )
        if world.world_size == 1 or caller is order:
            continue
        remedy = (
            "Pass the framework a shardio.DataLoader, which it does not split again. Or let" if gives_order else "Let"
        )
        if (num_parts := _num_parts(caller)) > 1:
            raise RuntimeError(
                f"{kind} splits the samples over {num_parts} processes, but the {name} has already split them (this is "
                f"rank {world.rank} of {world.world_size}), so samples would be lost. {remedy} only the framework "
                f"split: create {name}(..., rank=0, world_size=1). See docs/frameworks.md"
            )


def find_callers() -> Iterator[Any]:
    """Yield the objects whose methods called this function, innermost first."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _METHODS and (caller := frame.f_locals.get("self")) is not None:
            yield caller


def _num_parts(caller: Any) -> int:
    """Return the number of processes over which an object splits what it iterates over."""
    if type(caller).__name__ == "DataLoaderDispatcher":  # Accelerate's: rank 0 reads for all ranks.
        return int(caller.state.num_processes)
    if isinstance(caller, DistributedSampler):
        return caller.num_replicas
    if _SHARDS & {kind.__name__ for kind in type(caller).__mro__}:
        return int(caller.num_processes)
    return 1  # In other classes, such attributes may describe what they wrap.
