"""What happens first in each of torch's worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardio.images import use_one_thread


@dataclass(frozen=True, slots=True)
class WorkerInit:
    """Start a worker: images are decoded side by side already, so each is resized on one thread."""

    users: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        use_one_thread()
        if self.users is not None:
            self.users(worker_id)
