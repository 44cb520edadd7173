"""The pool of a loader's worker processes: the training process starts them, sends them chunks and restarts them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from shardio.background import start_process
from shardio.forks import call_at_fork
from shardio.loader.processes.deaths import Death
from shardio.loader.processes.messages import Cancel, Chunk, ForgetSlots, NewSlot, Outcome, Ping, Pong, WorkerSetup
from shardio.loader.processes.wire import make_pair, receive, send
from shardio.loader.slots.memory import Layout
from shardio.processors import count_processors

MAX_SINGLE_THREAD_PROCESSES = 4
"""Up to this many threads get a process each, because threads that share one wait for the GIL a tenth of the time."""

THREADS_PER_PROCESS = 2
"""The threads per process if there are more threads, because each process needs 30 MB."""

PATIENCE_S = 5.0
"""How long all processes may be silent before they are pinged, and how long an answer may take."""

STARTUP_PATIENCE_S = 120.0
"""How long a process may take to start, even from a slow disk or a network file system."""

CLOSE_S = 5.0
"""How long processes may take to end before they are killed."""

EXIT_S = 1.0
"""How long a process that closed its end may take to exit."""


class _Process:
    """One worker process: this side's end of the socket pair, and the chunks that it has not answered."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.num_threads = setup.num_threads
        self.unanswered: dict[int, None] = {}  # Chunk ids, in the order of submission.
        self.is_ready = False
        self.asked_at: float | None = None
        self.end, theirs = make_pair()
        try:
            self.process = _start_process(theirs.fileno())
        except BaseException:  # Ctrl-C must not leave it open either.
            self.end.close()
            raise
        finally:
            theirs.close()
        self.end.setblocking(False)
        with suppress(ConnectionError):  # It has died already; the next receive notices.
            send(self.end, setup)

    @property
    def load(self) -> float:
        return len(self.unanswered) / self.num_threads

    @property
    def patience_s(self) -> float:
        """How long it may be silent."""
        return PATIENCE_S if self.is_ready else STARTUP_PATIENCE_S

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; return False if the process has read nothing for too long.

        This call waits while the socket is full. It cannot deadlock, because the main thread of a worker process only
        reads and never waits for room to write. Its other threads may wait.
        """
        room = select.poll()
        room.register(self.end, select.POLLOUT)
        while True:
            with suppress(BlockingIOError):
                send(self.end, message, descriptors)
                return True
            if not room.poll(1000 * self.patience_s):
                return False

    def wait(self, deadline: float) -> None:
        """Wait until the process exits, after its end was closed; kill it at the deadline."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self, *, is_exiting: bool = False) -> str:
        """Kill the process if it is alive, wait until it cannot write to slots any more, and describe how it ended."""
        if is_exiting:  # Its own exit code says more than the signal of this kill.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_S)
        self.process.kill()
        code = self.process.wait()
        self.end.close()
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"worker process {self.process.pid} {ended}"


class WorkerPool:
    """The worker processes of one loader. They end when the pool is closed or freed.

    Args:
        setup: What they need before their first chunk; ``num_threads`` is the total number of threads.

    Attributes:
        num_threads: How many chunks are made at a time.
        is_closed: Whether the pool was closed.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.num_threads = setup.num_threads
        self.is_closed = False
        self._setup = setup
        self._process_id = os.getpid()
        self._chunk_ids = count()
        self._processes: list[_Process] = []
        self._dying: dict[_Process, str] = {}  # Unreachable processes, and why they are killed.
        self._finalizer = weakref.finalize(self, _close_all, self._processes, os.getpid())
        call_at_fork(self, after_in_child=WorkerPool.leave_to_parent)
        for num_threads in divide_threads(setup.num_threads, count_processors()):
            self._processes.append(_Process(replace(setup, num_threads=num_threads)))

    @property
    def belongs_here(self) -> bool:
        """Whether this process created the pool; false in a forked child."""
        return self._process_id == os.getpid()

    def next_chunk_id(self) -> int:
        """Return the id of the next chunk."""
        return next(self._chunk_ids)

    def announce(self, slot_id: int, layout: Layout, descriptor: int) -> None:
        """Send a new slot to all processes."""
        self._send_all(NewSlot(slot_id=slot_id, layout=layout), [descriptor])

    def forget(self, slot_ids: tuple[int, ...]) -> None:
        """Make all processes drop slots that no later chunk uses."""
        self._send_all(ForgetSlots(slot_ids=slot_ids))

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
            for descriptor, _ in ready:
                received += self._read(processes[descriptor])
            if not ready:
                self._check_life()
        return [*received, *self._restart_dying()]

    def close(self) -> None:
        """End all processes."""
        self.is_closed = True
        self._finalizer()

    def leave_to_parent(self) -> None:
        """Close all ends in a forked child, so that the worker processes do not outlive the parent."""
        for process in self._processes:
            process.end.close()
            process.process.returncode = 0  # It is not a child of this process, which cannot wait for it.

    def _read(self, process: _Process) -> list[Outcome]:
        received: list[Outcome] = []
        while True:
            try:
                packet = receive(process.end)
            except BlockingIOError:
                return received
            if packet is None:
                self._dying[process] = ""
                return received
            message, _ = packet
            process.asked_at, process.is_ready = None, True
            if not isinstance(message, Pong) and message.chunk_id in process.unanswered:  # Otherwise it was cancelled.
                del process.unanswered[message.chunk_id]
                received.append(message)

    def _check_life(self) -> None:
        """Ping processes with unanswered chunks; give up those that have not answered in time."""
        now = time.monotonic()
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
            if not process.send(message, descriptors):
                self._dying[process] = f"no message was read for {process.patience_s:.0f} s: "
        except ConnectionError:
            self._dying[process] = ""

    def _restart_dying(self) -> list[Death]:
        """Restart unreachable processes, and drop all submitted chunks."""
        deaths: dict[_Process, Death] = {}
        while dying := {process: why for process, why in self._dying.items() if process not in deaths}:
            for process, why in dying.items():
                in_flight = tuple(process.unanswered)[: process.num_threads]
                cause = why + process.kill(is_exiting=not why)
                deaths[process] = Death(cause=cause, in_flight=in_flight, was_ready=process.is_ready)
            self.cancel()  # This may reveal more dead processes.
        for process in deaths:  # Afterwards, because a new process may die at once.
            setup = replace(self._setup, num_threads=process.num_threads)
            self._processes[self._processes.index(process)] = _Process(setup)
            del self._dying[process]
        if not deaths:
            return []
        # One death for all, because its receiver submits every chunk again, under new ids.
        return [
            Death(
                cause="; ".join(death.cause for death in deaths.values()),
                in_flight=tuple(chunk_id for death in deaths.values() for chunk_id in death.in_flight),
                was_ready=any(death.was_ready for death in deaths.values()),
                num_processes=len(deaths),
            )
        ]


def divide_threads(num_threads: int, num_processors: int) -> list[int]:
    """Return the number of threads of each process. More processes than processors would not help."""
    wanted = max(min(num_threads, MAX_SINGLE_THREAD_PROCESSES), -(-num_threads // THREADS_PER_PROCESS))
    num_processes = min(wanted, num_processors)
    return [num_threads // num_processes + (i < num_threads % num_processes) for i in range(num_processes)]


def _start_process(descriptor: int) -> subprocess.Popen[bytes]:
    return start_process(
        "shardio.loader.processes.worker_process:main",
        [descriptor, os.getpid()],
        # numpy and OpenCV would start a thread for each core, but decode threads already keep all cores busy.
        environment={"OPENBLAS_NUM_THREADS": "1", "OPENCV_FOR_THREADS_NUM": "1"},
        descriptors=[descriptor],
        cwd="/",  # Readers hold absolute paths, and this process's directory may be gone.
    )


def _close_all(processes: list[_Process], process_id: int) -> None:
    if os.getpid() != process_id:
        return
    for process in processes:
        with suppress(OSError):  # It has died.
            process.end.shutdown(socket.SHUT_RDWR)  # Closing alone has no effect while another process has a copy.
        process.end.close()
    deadline = time.monotonic() + CLOSE_S
    for process in processes:
        process.wait(deadline)
    processes.clear()
