"""The interface of a loader's workers, which are processes or threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shardio.loader.fetching.messages import Answer, BeginEpoch, Fetched, FetchTask


class FetchWorkers(Protocol):
    """The workers of one loader. They end when they are closed or freed.

    Attributes:
        members: The processes or threads.
        max_tasks: How many batches may be fetched ahead now.
    """

    max_tasks: int

    @property
    def members(self) -> Sequence[Any]: ...

    @property
    def belongs_here(self) -> bool:
        """Whether this process started the workers, instead of one that it was forked from."""

    def begin(self, requests: Sequence[BeginEpoch]) -> None:
        """Begin an epoch: one request for each worker."""

    def submit(self, worker_id: int, task: FetchTask) -> None:
        """Request a batch of a worker."""

    def receive(self, timeout_s: float | None) -> list[Answer]:
        """Wait for answers; return an empty list after ``timeout_s``.

        Raises:
            WorkerError: If a worker ended, or a worker process was stopped and does not continue.
        """

    def open(self, fetched: Fetched) -> Any:
        """Return the batch that a worker fetched. This is called once for each answer that is delivered."""

    def drop(self, task_id: int) -> None:
        """Drop the batch of a task that is not needed any more."""

    def release(self, worker_id: int) -> None:
        """End a worker that has nothing more to do."""

    def close(self) -> None:
        """End all workers and wait for them."""
