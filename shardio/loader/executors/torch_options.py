"""The setup of torch's workers: their loader's arguments, and their first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardio.images import use_one_thread
from shardio.loader.collate import CollateKept
from shardio.loader.executors.settings import ExecutorSettings


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """A ``worker_init_fn`` that makes each worker resize images in one thread, because workers run in parallel.

    Attributes:
        init_fn: The user's ``worker_init_fn``.
    """

    init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        use_one_thread()
        if self.init_fn is not None:
            self.init_fn(worker_id)


def torch_options(settings: ExecutorSettings) -> dict[str, Any]:
    """Return the arguments of the torch DataLoader that runs the workers for one of shardio's loaders."""
    return {
        "batch_size": settings.batch_size,
        "num_workers": settings.num_workers,
        "collate_fn": CollateKept(settings.collate_fn, is_batched=settings.batch_size is not None),
        "pin_memory": settings.pin_memory,
        "timeout": settings.timeout_s,
        "worker_init_fn": WorkerInit(settings.worker_init_fn),
        "multiprocessing_context": settings.multiprocessing_context,
        "generator": settings.generator,
        "prefetch_factor": settings.prefetch_factor,
        "persistent_workers": settings.persistent_workers,
        "pin_memory_device": settings.pin_memory_device,
    }
