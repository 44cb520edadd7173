"""The setup of torch's workers: their loader's arguments, their first call, and errors when they cannot start."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol, TypeVar

from shardio.images import use_one_thread
from shardio.loader.collate import CollateKept
from shardio.loader.executors.settings import ExecutorSettings


class _Loader(Protocol):
    num_workers: int

    @property
    def runs_torchs_workers(self) -> bool: ...


_L = TypeVar("_L", bound=_Loader)


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


def explain_obstacles(start: Callable[[_L], Any]) -> Callable[[_L], Any]:
    """Wrap a function so that its error explains why torch's workers cannot start without /dev/shm."""

    @wraps(start)
    def started(loader: _L) -> Any:
        try:
            return start(loader)
        except OSError as error:
            if not (loader.num_workers and loader.runs_torchs_workers) or (obstacle := _find_obstacle()) is None:
                raise
            raise OSError(
                error.errno,
                f"torch's worker processes cannot start: no semaphore is available ({obstacle.strerror}). They "
                "need a writable /dev/shm: mount one (docker run --shm-size=8g), or use num_workers=0. shardio's own "
                "worker processes do not need it; they run if the dataset and all transforms are shardio's, and no "
                "collate_fn, worker_init_fn or multiprocessing_context is set",
            ) from error

    return started


def _find_obstacle() -> OSError | None:
    try:
        multiprocessing.Lock()
    except OSError as error:
        return error
    return None


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
