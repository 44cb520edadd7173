"""The training process's side of its fork server, which starts and ends worker processes."""

from __future__ import annotations

import atexit
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from shardio.loader.wire import (
    AllWorkersEnded,
    EndAllWorkers,
    EndWorker,
    StartWorker,
    WorkerEnded,
    WorkerSetup,
    dump_setup,
    make_pair,
    receive,
    send_within,
)
from shardio.process import call_at_fork, describe_exit, start_process

CLOSE_S = 5.0
"""The time limit, in seconds, for a fork server to end all worker processes or itself; after that, they are killed."""

REUSE_OF_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(128 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Settings of glibc's malloc for user code, which makes new arrays for each image.

By default, malloc returns the memory of these arrays to the operating system, which must clear the pages again for the
next image. Clearing 600 kB of float32 takes 150 µs.
"""

EXIT_S = 1.0
"""The time, in seconds, that a process may take to exit after it has closed its end of the socket pair.

The process's own exit code is more informative than the one that a kill causes.
"""


class ForkServer:
    """A fork server, which imports the modules of worker processes once, for successive pools.

    The first call to :meth:`start_worker` starts the fork server. If the fork server has ended, the next call starts a
    new one. When this object is freed, a fork server that has imported user code is kept for the next ForkServer; any
    other fork server ends.
    """

    def __init__(self) -> None:
        self._setup: WorkerSetup
        self._running: RunningServer | None = None
        self._finalizer: weakref.finalize[..., ForkServer]
        self._how_it_ended = "there was no fork server"
        call_at_fork(self, after_in_child=ForkServer._leave_to_parent)

    @property
    def is_running(self) -> bool:
        """Whether the fork server has been started, and has neither been ended nor found dead."""
        return self._running is not None and self._finalizer.alive  # Finalizers run in any order when Python exits.

    def set_up(self, setup: WorkerSetup) -> None:
        """Define the setup for worker processes that are started from now on.

        User code may depend on this process's environment variables, module search path and working directory. If
        they have changed, or a module has been reloaded, the next worker process gets a new fork server.
        """
        self._setup = setup
        if self._running is not None:
            if self._running.is_usable(setup):
                self._send_setup(self._running)
            else:
                self.close()

    def start_worker(self, worker_id: int, num_threads: int, patience_s: float) -> socket.socket:
        """Start a worker process, without waiting for it, and return this side's end of its socket pair.

        If the process cannot start, the other end is closed.

        Args:
            worker_id: The process's number, larger than that of every earlier worker process of the pool.
            num_threads: The number of chunks that the process makes at once.
            patience_s: The maximum time, in seconds, that the fork server may go without reading.
        """
        running = self._running or self._start()
        ours, theirs = make_pair()
        try:
            with theirs, suppress(ConnectionError):  # If the fork server has died, no process has the other end.
                request = StartWorker(worker_id=worker_id, num_threads=num_threads)
                send_within(patience_s, running.end, request, [theirs.fileno()])
            ours.setblocking(False)
        except BaseException:  # Close this end even after Ctrl-C.
            ours.close()
            raise
        return ours

    def end_worker(self, worker_id: int, *, is_exiting: bool, patience_s: float) -> str:
        """Kill a worker process if it is alive, wait until it has ended, and describe how it ended.

        If the fork server does not answer, it is ended and all worker processes are killed.

        Args:
            worker_id: The number of the worker process.
            is_exiting: Whether the worker process has closed its end of the socket pair.
            patience_s: The maximum time, in seconds, that the fork server may take to answer.
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
        running = _kept.take(self._setup) or _start(self._setup)
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
                running.surroundings = find_surroundings()  # Loading the setup may import more modules.
            # A ConnectionError means that the fork server has died; starting the first worker process will show this.
            with suppress(ConnectionError):
                if not send_within(CLOSE_S, running.end, content):
                    self.close()

    def _ask(self, request: Any, patience_s: float) -> WorkerEnded | AllWorkersEnded | None:
        """Return the answer to a request; if none arrives in time, end all processes of the server and return None."""
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
            if not is_answered:  # No later request may receive this answer, even after Ctrl-C.
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


@dataclass(slots=True, kw_only=True, eq=False)
class RunningServer:
    """A running fork server.

    Attributes:
        process: The process.
        end: This side's end of the server's socket pair.
        surroundings: A snapshot of what the server's user code may depend on; None if the server runs no user code.
        digest: A hash of the server's setup.
        owner_id: The id of the process that started the server.
    """

    process: subprocess.Popen[bytes]
    end: socket.socket
    surroundings: Surroundings | None
    digest: bytes = b""
    owner_id: int = field(default_factory=os.getpid)

    def is_usable(self, setup: WorkerSetup) -> bool:
        """Return whether worker processes with this setup can use this fork server instead of a new one."""
        if self.process.poll() is not None or setup.runs_user_code != (self.surroundings is not None):
            return False
        return self.surroundings is None or self.surroundings.are_current

    def close(self, patience_s: float) -> int:
        """End this server and all worker processes; kill them after ``patience_s``. Return the server's exit code."""
        with suppress(OSError):  # The fork server has died.
            self.end.shutdown(socket.SHUT_RDWR)  # Closing has no effect while another process has a copy of this end.
        self.end.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        # If the fork server was killed, worker processes are still running; their process group keeps the server's id.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def leave_to_parent(self) -> None:
        """Close this end in a forked child. Otherwise, the fork server would outlive the parent."""
        self.end.close()
        # The fork server is not a child of this process, so this process cannot wait for it.
        self.process.returncode = 0


def release(running: RunningServer) -> None:
    """Keep a fork server for the next loader, or end it."""
    if os.getpid() != running.owner_id:
        return
    if running.surroundings is None or running.process.poll() is not None:
        running.close(CLOSE_S)
    else:
        _kept.keep(running)


def end_kept() -> None:
    """End the fork server that is kept for the next loader, if there is one."""
    _kept.end()


class _Kept:
    """A holder of at most one fork server that has imported user code and that no loader uses."""

    def __init__(self) -> None:
        self._servers: deque[RunningServer] = deque()  # A deque's methods are atomic, and any thread may free a loader.
        self._is_exiting = False
        call_at_fork(self, after_in_child=_Kept.leave_to_parent)
        atexit.register(self.exit)

    def take(self, setup: WorkerSetup) -> RunningServer | None:
        """Return the fork server if it is usable; otherwise, end it."""
        if not setup.runs_user_code or (running := self._pop()) is None:
            return None
        if running.is_usable(setup):
            return running
        running.close(CLOSE_S)
        return None

    def keep(self, running: RunningServer) -> None:
        """Keep a fork server, and end the previous one. While Python is exiting, no fork server is kept."""
        if self._is_exiting:
            running.close(CLOSE_S)
            return
        self.end()
        self._servers.append(running)

    def end(self) -> None:
        while (running := self._pop()) is not None:
            running.close(CLOSE_S)

    def exit(self) -> None:
        self._is_exiting = True
        self.end()

    def leave_to_parent(self) -> None:
        while (running := self._pop()) is not None:
            running.leave_to_parent()

    def _pop(self) -> RunningServer | None:
        try:
            return self._servers.popleft()
        except IndexError:
            return None


_kept = _Kept()


def _start(setup: WorkerSetup) -> RunningServer:
    end, theirs = make_pair()
    try:
        with theirs:
            surroundings = find_surroundings() if setup.runs_user_code else None
            process = _start_process(theirs.fileno(), setup)
        end.setblocking(False)
    except BaseException:  # Close this end even after Ctrl-C.
        end.close()
        raise
    return RunningServer(process=process, end=end, surroundings=surroundings)


def _start_process(descriptor: int, setup: WorkerSetup) -> subprocess.Popen[bytes]:
    # Libraries would start a thread for each core. A fork server must have no other threads, and decoding threads
    # already keep all cores busy.
    environment = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM", "OMP_NUM_THREADS"), "1")
    if setup.runs_user_code:
        environment |= {name: value for name, value in REUSE_OF_MEMORY.items() if name not in os.environ}
    return start_process(
        "shardio.loader.chunk_worker:main",
        [descriptor, os.getpid()],
        environment=environment,
        descriptors=[descriptor],
        # The working directory may no longer exist, and readers hold absolute paths. User code, however, may open
        # relative paths.
        cwd=None if setup.runs_user_code else "/",
        stdout=None,  # Transforms may print.
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surroundings:
    """A snapshot of what user code may depend on in a process: its settings and modules.

    Attributes:
        cwd: The working directory; None if the directory no longer exists.
        environment: The environment variables.
        module_path: ``sys.path``.
        specs: The spec of each imported module. Reloading a module gives it a new spec.
    """

    cwd: str | None
    environment: Mapping[str, str]
    module_path: tuple[str, ...]
    specs: Mapping[str, object]

    @property
    def are_current(self) -> bool:
        """Whether no setting has changed and no module has been reloaded since this snapshot was taken.

        Changes to module files do not count, because this process still has the code that it imported.
        """
        now = find_surroundings()
        if (self.cwd, self.environment, self.module_path) != (now.cwd, now.environment, now.module_path):
            return False
        # Two specs of the same file are equal, but are different objects.
        return all(now.specs.get(name, spec) is spec for name, spec in self.specs.items())


def find_surroundings() -> Surroundings:
    """Return a snapshot of the current settings and modules."""
    try:
        cwd = str(Path.cwd())
    except FileNotFoundError:
        cwd = None
    modules: dict[str, object] = dict(sys.modules)  # Some values in sys.modules are not modules.
    return Surroundings(
        cwd=cwd,
        environment=dict(os.environ),
        module_path=tuple(map(str, sys.path)),
        # Use ``vars``, because attribute access would import modules that are loaded on demand.
        specs={name: vars(each).get("__spec__") for name, each in modules.items() if isinstance(each, ModuleType)},
    )
