"""The training process's side of its fork server, which starts and ends worker processes."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardio.background import start_process
from shardio.forks import call_at_fork
from shardio.loader.processes.messages import (
    AllWorkersEnded,
    EndAllWorkers,
    EndWorker,
    StartWorker,
    WorkerEnded,
    WorkerSetup,
)
from shardio.loader.processes.setup import dump_setup
from shardio.loader.processes.wire import make_pair, receive, send_within

CLOSE_S = 5.0
"""How long the fork server may take to end all worker processes or itself before they are killed."""

EXIT_S = 1.0
"""How long a process that closed its end may take to exit. Its own exit code says more than the signal of a kill."""


class ForkServer:
    """A fork server for one pool of worker processes after another, so that their imports are done once.

    It starts with its first worker process and ends when this object is freed. If it ended before, the next worker
    process starts another one.
    """

    def __init__(self) -> None:
        self._setup: WorkerSetup
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket
        self._finalizer: weakref.finalize[..., ForkServer]
        self._digest: bytes  # Of the setup that it has.
        self._surroundings: object
        self._how_it_ended = "there was no fork server"
        call_at_fork(self, after_in_child=ForkServer._leave_to_parent)

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has neither been found dead nor ended."""
        return self._process is not None and self._finalizer.alive  # Finalizers run in any order when Python exits.

    def set_up(self, setup: WorkerSetup) -> None:
        """Determine what worker processes that are started from now on need before their first chunk.

        People's code may depend on this process's environment variables, module search path and working directory. If
        they have changed, the next worker process starts another fork server.
        """
        self._setup = setup
        if self._process is not None:
            if self._process.poll() is not None or self._surroundings != _find_surroundings(setup):
                self.close()
            else:
                self._send_setup()

    def start_worker(self, worker_id: int, num_threads: int, patience_s: float) -> socket.socket:
        """Start a worker process and return this side's end of its socket pair. This does not wait for the process.

        If the process cannot start, the other end is closed.

        Args:
            worker_id: Its number, larger than that of every earlier worker process of the pool.
            num_threads: The number of chunks that it makes at a time.
            patience_s: How long the fork server may read nothing.
        """
        if self._process is None:
            self._start()
        ours, theirs = make_pair()
        try:
            with theirs, suppress(ConnectionError):  # The fork server has died: nobody has the other end then.
                request = StartWorker(worker_id=worker_id, num_threads=num_threads)
                send_within(patience_s, self._end, request, [theirs.fileno()])
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
                return f"worker process {process_id} {_describe_exit(code)}"
            case _:
                return self._how_it_ended

    def end_all_workers(self) -> None:
        """Kill all worker processes and wait until they have ended."""
        self._ask(EndAllWorkers(), CLOSE_S)

    def close(self) -> None:
        """End the fork server and all worker processes."""
        self._close(CLOSE_S)

    def _start(self) -> None:
        self._end, theirs = make_pair()
        try:
            self._surroundings = _find_surroundings(self._setup)
            with theirs:
                # Readers hold absolute paths, and this directory may be gone. But people's code may open files.
                cwd = None if self._setup.runs_user_code else "/"
                self._process = _start_process(theirs.fileno(), cwd)
            self._finalizer = weakref.finalize(self, _end_abandoned, self._process, self._end, os.getpid())
        except BaseException:  # Ctrl-C must not leave it open either.
            self._end.close()
            raise
        self._end.setblocking(False)
        self._digest = b""
        self._send_setup()

    def _send_setup(self) -> None:
        """Send the setup, unless the fork server has it already."""
        content = dump_setup(self._setup)
        digest = hashlib.blake2b(content).digest()
        if digest != self._digest:
            self._digest = digest
            with suppress(ConnectionError):  # It has died already; the first worker process shows it.
                if not send_within(CLOSE_S, self._end, content):
                    self.close()

    def _ask(self, request: Any, patience_s: float) -> WorkerEnded | AllWorkersEnded | None:
        """Return the answer to a request; if there is none in time, end everything and return None."""
        if not self.is_running:
            return None
        answers = select.poll()
        answers.register(self._end, select.POLLIN)
        is_answered = False
        try:
            with suppress(ConnectionError):
                if send_within(patience_s, self._end, request) and answers.poll(1000 * patience_s):
                    received = receive(self._end)
                    is_answered = received is not None
                    return None if received is None else received[0]
        finally:
            if not is_answered:  # Also after Ctrl-C: nobody else may receive this answer.
                self._close(EXIT_S)
        return None

    def _close(self, patience_s: float) -> None:
        if self._process is not None:
            code = _end(self._process, self._end, patience_s)
            self._how_it_ended = f"fork server {self._process.pid} {_describe_exit(code)}"
            self._process = None
            self._finalizer.detach()

    def _leave_to_parent(self) -> None:
        """Close the end in a forked child, so that the fork server does not outlive the parent."""
        if self._process is not None:
            self._end.close()
            self._process.returncode = 0  # It is not a child of this process, which cannot wait for it.
            self._process = None
            self._finalizer.detach()


def _end(process: subprocess.Popen[bytes], end: socket.socket, patience_s: float) -> int:
    """Wait until a fork server has ended all worker processes and itself; kill them after ``patience_s``."""
    with suppress(OSError):  # It has died.
        end.shutdown(socket.SHUT_RDWR)  # Closing alone has no effect while another process has a copy.
    end.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s)
    # The worker processes are in its group. If it was killed, they are still there, and the group has its number.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _end_abandoned(process: subprocess.Popen[bytes], end: socket.socket, process_id: int) -> None:
    if os.getpid() == process_id:
        _end(process, end, CLOSE_S)


def _find_surroundings(setup: WorkerSetup) -> object:
    """Return what people's code may depend on, or None if there is none."""
    if not setup.runs_user_code:
        return None
    try:
        cwd = Path.cwd()
    except FileNotFoundError:
        cwd = None  # The directory is gone.
    return cwd, dict(os.environ), list(map(str, sys.path))


def _describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _start_process(descriptor: int, cwd: str | None) -> subprocess.Popen[bytes]:
    return start_process(
        "shardio.loader.processes.fork_server_process:main",
        [descriptor, os.getpid()],
        # Libraries would start a thread for each core. A fork server must have no threads, and decode threads already
        # keep all cores busy.
        environment=dict.fromkeys(("OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM", "OMP_NUM_THREADS"), "1"),
        descriptors=[descriptor],
        cwd=cwd,
        stdout=None,  # People print in their transforms.
    )
