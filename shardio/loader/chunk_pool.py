"""The training process's pool, which starts and restarts a loader's worker processes and sends them chunks."""

from __future__ import annotations

import select
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from shardio.errors import WorkerError
from shardio.loader.buffers import ForgetBuffers, Layout, NewBuffer
from shardio.loader.fork_server import CLOSE_S, ForkServer
from shardio.loader.wire import (
    Cancel,
    Chunk,
    Failed,
    Made,
    Outcome,
    Ping,
    WorkerMemory,
    WorkerSetup,
    receive_ready,
    send_within,
)
from shardio.process import Owned, call_at_fork, count_processors
from shardio.values import format_bytes

PATIENCE_S = 5.0
"""The time, in seconds, that all processes may be silent before they are pinged, and that an answer may take."""

STARTUP_PATIENCE_S = 120.0
"""The time, in seconds, that a process may take to start, even from a slow disk or a network file system."""

GROWTH_BYTES = 1 << 30
"""A worker process may use twice its initial memory plus this many bytes before a warning is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The death and restart of worker processes. All unanswered chunks must be submitted again.

    Attributes:
        cause: The cause of death, for messages.
        in_flight: The ids of the chunks that the processes were making.
        was_ready: Whether one of the processes had started.
        num_processes: The number of processes that died at the same time.
    """

    cause: str
    in_flight: tuple[int, ...]
    was_ready: bool
    num_processes: int = 1


class WorkerPool(Owned):
    """The worker processes of one loader. The processes end when the pool is closed or freed.

    Args:
        server: The fork server, which starts and ends the processes. No other open pool uses this server.
        setup: The setup that each process receives before its first chunk.
        num_threads: The number of chunks that all processes together make at once.

    Attributes:
        server: The fork server. Another pool can use the server when this pool is closed.
        num_threads: The number of chunks that all processes together make at once.
        is_closed: Whether the pool was closed.
        memory: The memory of each worker process.
    """

    def __init__(self, server: ForkServer, setup: WorkerSetup, num_threads: int) -> None:
        self.server = server
        self.num_threads = num_threads
        self.is_closed = False
        self.memory = MemoryWatch(warns=setup.runs_user_code)
        self._chunk_ids, self._worker_ids = count(), count()
        self._processes: list[_Process] = []
        self._dying: dict[_Process, str] = {}  # Unreachable processes, and the reasons why they are killed.
        self._heard_at = time.monotonic()  # The time of the latest message from any process.
        super().__init__(partial(_close_all, server, self._processes))
        call_at_fork(self, after_in_child=WorkerPool.leave_to_parent)
        server.set_up(setup)
        # User code gets one thread per process, because it may hold the GIL and draws from generators that all threads
        # of a process share.
        is_split = setup.runs_user_code
        for threads in [1] * num_threads if is_split else divide_threads(num_threads, count_processors()):
            self._processes.append(_Process(server, next(self._worker_ids), threads))

    def next_chunk_id(self) -> int:
        """Return the id of the next chunk."""
        return next(self._chunk_ids)

    def announce(self, buffer_id: int, layout: Layout, descriptor: int) -> None:
        """Send a new buffer to all processes."""
        self._send_all(NewBuffer(buffer_id=buffer_id, layout=layout), [descriptor])

    def forget(self, buffer_ids: tuple[int, ...]) -> None:
        """Make all processes drop buffers that no later chunk uses."""
        self._send_all(ForgetBuffers(buffer_ids=buffer_ids))

    def submit(self, chunks: Iterable[Chunk]) -> None:
        """Send each chunk to the process with the least load, unless that process is about to be restarted."""
        shares: dict[_Process, list[Chunk]] = {}
        for chunk in chunks:
            process = min(self._processes, key=lambda process: process.load)
            process.unanswered[chunk.chunk_id] = None
            shares.setdefault(process, []).append(chunk)
        for process, share in shares.items():
            self._send(process, share)

    def cancel(self) -> None:
        """Drop all submitted chunks."""
        self._send_all(Cancel())
        for process in self._processes:
            process.unanswered.clear()

    def receive(self, timeout_s: float | None) -> list[Outcome | Death]:
        """Wait for outcomes; return an empty list after ``timeout_s``, or after a check of silent processes."""
        received: list[Outcome | Death] = []
        if not self._dying:
            poll = select.poll()
            processes = {process.end.fileno(): process for process in self._processes}
            for descriptor in processes:
                poll.register(descriptor, select.POLLIN)
            ready = poll.poll(1000 * (PATIENCE_S if timeout_s is None else min(timeout_s, PATIENCE_S)))
            now = time.monotonic()
            for descriptor, _ in ready:
                received += self._read(processes[descriptor])
            if ready:
                self._heard_at = now
            elif now - self._heard_at >= PATIENCE_S:
                self._check_life(now)
        return [*received, *self._restart_dying()]

    def close(self) -> None:
        self.is_closed = True
        super().close()

    def leave_to_parent(self) -> None:
        """Close the sockets in a forked child. Otherwise, the worker processes would outlive the parent."""
        for process in self._processes:
            process.end.close()

    def _read(self, process: _Process) -> list[Outcome]:
        received: list[Outcome] = []
        for packet in receive_ready(process.end):
            if packet is None:
                self._dying[process] = ""
                break
            message, _ = packet
            process.asked_at, process.is_ready = None, True
            match message:
                case WorkerMemory():
                    self.memory.record(process.worker_id, message.num_bytes)
                case Made() | Failed() if message.chunk_id in process.unanswered:  # Otherwise, the chunk was canceled.
                    del process.unanswered[message.chunk_id]
                    received.append(message)
        return received

    def _check_life(self, now: float) -> None:
        # Ping processes with unanswered chunks; give up on those that have not answered in time.
        for process in self._processes:
            if not process.unanswered:
                continue
            if process.asked_at is None:
                process.asked_at = now
                self._send(process, Ping())
            elif now - process.asked_at >= process.patience_s:
                self._dying[process] = f"no answer for {process.patience_s:.0f} s: "

    def _send_all(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        for process in self._processes:
            self._send(process, message, descriptors)

    def _send(self, process: _Process, message: Any, descriptors: Sequence[int] = ()) -> None:
        if process in self._dying:
            return
        try:
            if not send_within(process.patience_s, process.end, message, descriptors):
                self._dying[process] = f"no message was read for {process.patience_s:.0f} s: "
        except ConnectionError:
            self._dying[process] = ""

    def _restart_dying(self) -> list[Death]:
        deaths: dict[_Process, Death] = {}
        while dying := {process: why for process, why in self._dying.items() if process not in deaths}:
            for process, why in dying.items():
                in_flight = tuple(process.unanswered)[: process.num_threads]
                ended = self.server.end_worker(process.worker_id, is_exiting=not why, patience_s=process.patience_s)
                ended += self.memory.forget(process.worker_id)
                deaths[process] = Death(cause=why + ended, in_flight=in_flight, was_ready=process.is_ready)
            if not self.server.is_running:  # All worker processes ended with the fork server.
                self._dying.update((process, "") for process in self._processes if process not in self._dying)
            self.cancel()  # Sending the message may reveal more dead processes.
        if not self.server.is_running:  # Otherwise, the fork server has waited for them to end.
            for process in deaths:
                process.await_end()
        for process in deaths:  # Restart only now, because a new process may die immediately.
            process.end.close()
            restarted = _Process(self.server, next(self._worker_ids), process.num_threads)
            self._processes[self._processes.index(process)] = restarted
            del self._dying[process]
        if not deaths:
            return []
        # Report one death for all processes, because the receiver submits every chunk again, under new ids.
        return [
            Death(
                cause="; ".join(dict.fromkeys(death.cause for death in deaths.values())),
                in_flight=tuple(chunk_id for death in deaths.values() for chunk_id in death.in_flight),
                was_ready=any(death.was_ready for death in deaths.values()),
                num_processes=len(deaths),
            )
        ]


def divide_threads(num_threads: int, num_processors: int) -> list[int]:
    """Return the number of threads for each process: one, or more if there are fewer processors than threads.

    Threads that share a process spend a tenth of their time waiting for the GIL.
    """
    num_processes = min(num_threads, num_processors)
    return [num_threads // num_processes + (i < num_threads % num_processes) for i in range(num_processes)]


def _close_all(server: ForkServer, processes: list[_Process]) -> None:
    for process in processes:  # Close these first: Ctrl-C may interrupt the wait for the fork server.
        process.end.close()
    server.end_all_workers()
    processes.clear()


class _Process:
    """A worker process: this side's end of the socket pair, and the unanswered chunks."""

    def __init__(self, server: ForkServer, worker_id: int, num_threads: int) -> None:
        self.worker_id = worker_id
        self.num_threads = num_threads
        self.unanswered: dict[int, None] = {}  # Chunk ids, in the order of submission.
        self.is_ready = False
        self.asked_at: float | None = None
        self.end = server.start_worker(worker_id, num_threads, self.patience_s)

    @property
    def load(self) -> float:
        return len(self.unanswered) / self.num_threads

    @property
    def patience_s(self) -> float:
        return PATIENCE_S if self.is_ready else STARTUP_PATIENCE_S

    def await_end(self) -> None:
        """Wait until the killed process can no longer write to buffers."""
        closed = select.poll()
        # The process's end of the socket pair is closed only after the process's memory is unmapped.
        closed.register(self.end, 0)
        if not closed.poll(1000 * CLOSE_S):
            raise WorkerError("a killed worker process has not ended: it may be waiting for a slow disk or network")


class MemoryWatch:
    """The memory of each worker process of a pool, as last reported.

    Args:
        warns: Whether to warn about growth.

    Attributes:
        bytes_by_worker: The memory of each living worker process, by its id.
    """

    def __init__(self, *, warns: bool) -> None:
        self.bytes_by_worker: dict[int, int] = {}
        self._warns = warns
        self._firsts: dict[int, int] = {}
        self._limits: dict[int, int] = {}

    def record(self, worker_id: int, num_bytes: int) -> None:
        """Record the memory of a worker process, and warn if it has grown considerably.

        After the first warning, warn each time that the memory has doubled since the last warning.
        """
        self.bytes_by_worker[worker_id] = num_bytes
        first = self._firsts.setdefault(worker_id, num_bytes)
        if self._warns and num_bytes > self._limits.setdefault(worker_id, 2 * first + GROWTH_BYTES):
            self._limits[worker_id] = 2 * num_bytes
            warnings.warn(
                f"a worker process uses {format_bytes(num_bytes)} of memory, {format_bytes(num_bytes - first)} more "
                "than when it started. If it keeps growing, your transform, decoders or collate_fn leak memory: watch "
                "loader.stats().worker_bytes",
                RuntimeWarning,
                stacklevel=2,
            )

    def forget(self, worker_id: int) -> str:
        """Stop watching a worker process that has died; return its last known memory use as text for messages."""
        self._firsts.pop(worker_id, None)
        self._limits.pop(worker_id, None)
        num_bytes = self.bytes_by_worker.pop(worker_id, 0)
        return f" (it used {format_bytes(num_bytes)} of memory before its last chunks)" if num_bytes else ""
