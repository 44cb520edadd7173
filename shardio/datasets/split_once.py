"""The rule that an epoch is split over ranks once: what has taken its rank's share refuses to be dealt out again.

Frameworks wrap a loader or a dataset in objects of their own, which give each process a part of what they iterate
over. They ask nothing of a dataset that they wrap, so the wrapper is looked for where it must be: among the callers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from shardio.world import World

_METHODS = frozenset({"__iter__", "__len__", "set_epoch"})
"""The methods in which a wrapper calls what it wraps. Only their local variables are looked at: looking at those of a
training loop would keep a batch alive."""

_SHARDS = frozenset({"IterableDatasetShard", "BatchSamplerShard"})
"""Of Accelerate's and Transformers'. They give each process its part of what they wrap."""

_SKIPPERS = frozenset({"SkipBatchSampler", "SkipDataLoader"})
"""Made by ``accelerate.skip_first_batches``."""


def refuse_second_split(order: Any, world: World, *, has_loader: bool) -> None:
    """Check that no caller deals out again what ``order`` yields, and none skips batches of a loader that it rebuilt.

    Args:
        order: The dataset or sampler that takes its rank's share.
        world: What it takes the share by.
        has_loader: Whether it is in a loader of shardio's.

    Raises:
        RuntimeError: If one does; the message names it, and says what to do.
    """
    name = type(order).__name__
    for caller in find_callers():
        kind = f"{type(caller).__module__}.{type(caller).__name__}"
        if has_loader and type(caller).__name__ in _SKIPPERS:
            raise RuntimeError(
                f"{kind} reads the {name} by a loader of its own, which knows neither the epoch nor the batches of the "
                "shardio.DataLoader that it was made from: resume with load_state_dict() of the shardio.DataLoader "
                "instead of skip_first_batches(). See docs/frameworks.md"
            )
        if world.world_size == 1 or caller is order:
            continue
        if (num_parts := _num_parts(caller)) > 1:
            raise RuntimeError(
                f"{kind} splits the samples over {num_parts} processes, and the {name} has split them already (this is "
                f"rank {world.rank} of {world.world_size}): samples would be lost. Pass a shardio.DataLoader to the "
                "framework, which leaves it as it is. Or let the framework alone split: "
                f"{name}(..., rank=0, world_size=1), which reads every sample on every rank. See docs/frameworks.md"
            )


def find_callers() -> Iterator[Any]:
    """Yield the objects that call each other up to here, the innermost first."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name in _METHODS and (caller := frame.f_locals.get("self")) is not None:
            yield caller


def _num_parts(caller: Any) -> int:
    """Return over how many processes an object deals what it iterates over."""
    if type(caller).__name__ == "DataLoaderDispatcher":  # Accelerate's: rank 0 reads for all.
        return int(caller.state.num_processes)
    if isinstance(caller, DistributedSampler):
        return caller.num_replicas
    if _SHARDS & {kind.__name__ for kind in type(caller).__mro__}:
        return int(caller.num_processes)
    return 1  # Others may hold such numbers for what they wrap.
