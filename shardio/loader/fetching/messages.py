"""The messages between a loader and its workers, which are processes or threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardio.loader.failures import Failure
from shardio.loader.processes.messages import StageTimes


@dataclass(kw_only=True, eq=False)
class BeginEpoch:
    """A request to begin an epoch. The worker answers with :class:`Begun`.

    Attributes:
        epoch_id: Its number among the epochs of these workers.
        state: Where the worker's part of the epoch begins; None for the beginning.
        num_to_skip: How many batches to leave out from there.
        follows_end: Whether the state is that of the end of the epoch before.
        state_every: After how many batches the worker reports its state; 0 for never.
    """

    epoch_id: int
    state: dict[str, Any] | None
    num_to_skip: int
    follows_end: bool
    state_every: int


@dataclass(kw_only=True, eq=False)
class FetchTask:
    """A request for one batch.

    Attributes:
        task_id: Its number, larger than that of every earlier one.
        index: What the sampler yielded: the indices of a batch, or the index of a sample.
        slot_id: The memory for the batch's tensors; None if the worker makes some.
    """

    task_id: int
    index: Any
    slot_id: int | None = None


@dataclass(kw_only=True, eq=False)
class Begun:
    """The answer to :class:`BeginEpoch`.

    Attributes:
        epoch_id: That of the request.
        worker_id: The worker.
        state: The state of the worker's dataset and its iterator; None if they have none.
        failure: Why the worker cannot fetch anything. It answers every task with it.
    """

    epoch_id: int
    worker_id: int
    state: dict[str, Any] | None
    failure: Failure | None = None


@dataclass(kw_only=True, eq=False)
class Fetched:
    """A batch.

    Attributes:
        task_id: The number of its task.
        worker_id: The worker that fetched it.
        content: The batch; a Parcel if it comes from another process.
        num_samples: How many samples it has.
        times: How long it took, and how long the worker waited for the request.
        state: The state after it; None if there is none, or if it was not due.
    """

    task_id: int
    worker_id: int
    content: Any
    num_samples: int
    times: StageTimes
    state: dict[str, Any] | None = None


@dataclass(kw_only=True, eq=False)
class FetchFailed:
    """An error instead of a batch."""

    task_id: int
    worker_id: int
    failure: Failure


@dataclass(kw_only=True, eq=False)
class WorkerExhausted:
    """The end of a worker's part of an iterable dataset, instead of a batch. Only the first one has the state."""

    task_id: int
    worker_id: int
    state: dict[str, Any] | None = None


Answer = Begun | Fetched | FetchFailed | WorkerExhausted
