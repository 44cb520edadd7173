"""An error that explains why torch's workers cannot start."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch.utils.data

from shardio.loader.executors.choice import why_not_ours

_L = TypeVar("_L", bound=torch.utils.data.DataLoader[Any])


def explain_obstacles(start: Callable[[_L], Any]) -> Callable[[_L], Any]:
    """Wrap a function so that its error explains why torch's workers cannot start without /dev/shm."""

    @wraps(start)
    def started(loader: _L) -> Any:
        try:
            return start(loader)
        except OSError as error:
            why = why_not_ours(loader)
            if not loader.num_workers or why is None or (obstacle := _find_obstacle()) is None:
                raise
            raise OSError(
                error.errno,
                f"torch's worker processes cannot start: no semaphore is available ({obstacle.strerror}). They "
                "need a writable /dev/shm: mount one (docker run --shm-size=8g), or use num_workers=0. shardio's own "
                f"worker processes do not need it, but torch makes these batches: {why}",
            ) from error

    return started


def _find_obstacle() -> OSError | None:
    try:
        multiprocessing.Lock()
    except OSError as error:
        return error
    return None
