"""The training process's side of its fork server, which starts and ends worker processes."""

from __future__ import annotations

import hashlib
import select
import socket
import weakref
from contextlib import suppress
from typing import Any

from shardio.forks import call_at_fork
from shardio.loader.processes.deaths import describe_exit
from shardio.loader.processes.messages import (
    AllWorkersEnded,
    EndAllWorkers,
    EndWorker,
    StartWorker,
    WorkerEnded,
    WorkerSetup,
)
from shardio.loader.processes.running_servers import CLOSE_S, RunningServer, release, start_server
from shardio.loader.processes.setup import dump_setup
from shardio.loader.processes.surroundings import find_surroundings
from shardio.loader.processes.wire import make_pair, receive, send_within

EXIT_S = 1.0
"""How long a process that closed its end may take to exit. Its own exit code says more than the signal of a kill."""


class ForkServer:
    """A fork server for one pool of worker processes after another, so that their imports are done once.

    It starts with its first worker process. If it ended before, the next worker process starts another one. When this
    object is freed, a fork server that has imported people's code is kept for the next ForkServer; any other one ends.
    """

    def __init__(self) -> None:
        self._setup: WorkerSetup
        self._running: RunningServer | None = None
        self._finalizer: weakref.finalize[..., ForkServer]
        self._how_it_ended = "there was no fork server"
        call_at_fork(self, after_in_child=ForkServer._leave_to_parent)

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has neither been found dead nor ended."""
        return self._running is not None and self._finalizer.alive  # Finalizers run in any order when Python exits.

    def set_up(self, setup: WorkerSetup) -> None:
        """Determine what worker processes that are started from now on need before their first chunk.

        People's code may depend on this process's environment variables, module search path and working directory. If
        they have changed, or a module was reloaded, the next worker process starts another fork server.
        """
        self._setup = setup
        if self._running is not None:
            if self._running.is_usable(setup):
                self._send_setup(self._running)
            else:
                self.close()

    def start_worker(self, worker_id: int, num_threads: int, patience_s: float) -> socket.socket:
        """Start a worker process and return this side's end of its socket pair. This does not wait for the process.

        If the process cannot start, the other end is closed.

        Args:
            worker_id: Its number, larger than that of every earlier worker process of the pool.
            num_threads: The number of chunks that it makes at a time.
            patience_s: How long the fork server may read nothing.
        """
        running = self._running or self._start()
        ours, theirs = make_pair()
        try:
            with theirs, suppress(ConnectionError):  # The fork server has died: nobody has the other end then.
                request = StartWorker(worker_id=worker_id, num_threads=num_threads)
                send_within(patience_s, running.end, request, [theirs.fileno()])
            ours.setblocking(False)
        except BaseException:  # Ctrl-C must not leave it open either.
            ours.close()
            raise
        return ours

    def end_worker(self, worker_id: int, *, is_exiting: bool, patience_s: float) -> str:
        """Kill a worker process if it is alive, wait until it has ended, and describe how it ended.

        If the fork server does not answer, it is ended and all worker processes are killed.

        Args:
            worker_id: Its number.
            is_exiting: Whether it has closed its end.
            patience_s: How long the fork server may take to answer.
        """
        request = EndWorker(worker_id=worker_id, patience_s=EXIT_S if is_exiting else 0.0)
        match self._ask(request, request.patience_s + patience_s):
            case WorkerEnded(process_id=process_id, exit_code=code):
                return describe_exit(f"DataLoader worker (pid {process_id})", code)
            case _:
                return self._how_it_ended

    def end_all_workers(self) -> None:
        """Kill all worker processes and wait until they have ended."""
        self._ask(EndAllWorkers(), CLOSE_S)

    def close(self) -> None:
        """End the fork server and all worker processes."""
        self._close(CLOSE_S)

    def _start(self) -> RunningServer:
        """Start a fork server, or take the one that was kept."""
        running = start_server(self._setup)
        self._running, self._finalizer = running, weakref.finalize(self, release, running)
        self._send_setup(running)
        return running

    def _send_setup(self, running: RunningServer) -> None:
        """Send the setup, unless the fork server has it already."""
        content = dump_setup(self._setup)
        digest = hashlib.blake2b(content).digest()
        if digest != running.digest:
            running.digest = digest
            if running.surroundings is not None:
                running.surroundings = find_surroundings()  # It may import further modules.
            with suppress(ConnectionError):  # It has died already; the first worker process shows it.
                if not send_within(CLOSE_S, running.end, content):
                    self.close()

    def _ask(self, request: Any, patience_s: float) -> WorkerEnded | AllWorkersEnded | None:
        """Return the answer to a request; if there is none in time, end everything and return None."""
        running = self._running
        if running is None or not self.is_running:
            return None
        answers = select.poll()
        answers.register(running.end, select.POLLIN)
        is_answered = False
        try:
            with suppress(ConnectionError):
                if send_within(patience_s, running.end, request) and answers.poll(1000 * patience_s):
                    received = receive(running.end)
                    is_answered = received is not None
                    return None if received is None else received[0]
        finally:
            if not is_answered:  # Also after Ctrl-C: nobody else may receive this answer.
                self._close(EXIT_S)
        return None

    def _close(self, patience_s: float) -> None:
        if self._running is not None:
            code = self._running.close(patience_s)
            self._how_it_ended = describe_exit(f"fork server {self._running.process.pid}", code)
            self._running = None
            self._finalizer.detach()

    def _leave_to_parent(self) -> None:
        if self._running is not None:
            self._running.leave_to_parent()
            self._running = None
            self._finalizer.detach()
