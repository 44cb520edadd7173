"""The fork servers that run, and the one that is kept for the next loader."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from shardio.background import start_process
from shardio.forks import call_at_fork
from shardio.loader.processes.messages import WorkerSetup
from shardio.loader.processes.surroundings import Surroundings, find_surroundings
from shardio.loader.processes.wire import make_pair

CLOSE_S = 5.0
"""How long a fork server may take to end all worker processes or itself before they are killed."""

REUSE_OF_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(128 << 20), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Settings of glibc's malloc for people's code, which makes new arrays for each image.

By default, malloc returns the memory of these arrays to the kernel, which must clear the pages again for the next
image. For 600 kB of float32, that takes 150 µs.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class RunningServer:
    """A fork server that runs.

    Attributes:
        process: The process.
        end: This side's end of its socket pair.
        surroundings: What people's code may depend on; None if it runs none.
        digest: A hash of the setup that it has.
        owner_id: The process that started it.
    """

    process: subprocess.Popen[bytes]
    end: socket.socket
    surroundings: Surroundings | None
    digest: bytes = b""
    owner_id: int = field(default_factory=os.getpid)

    def is_usable(self, setup: WorkerSetup) -> bool:
        """Return whether worker processes with a setup can be forked from it as from a new one."""
        if self.process.poll() is not None or setup.runs_user_code != (self.surroundings is not None):
            return False
        return self.surroundings is None or self.surroundings.are_current

    def close(self, patience_s: float) -> int:
        """Wait until it has ended all worker processes and itself; kill them after ``patience_s``."""
        with suppress(OSError):  # It has died.
            self.end.shutdown(socket.SHUT_RDWR)  # Closing alone has no effect while another process has a copy.
        self.end.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        # The worker processes are in its group. If it was killed, they are still there, and the group has its number.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def leave_to_parent(self) -> None:
        """Close the end in a forked child, so that the fork server does not outlive the parent."""
        self.end.close()
        self.process.returncode = 0  # It is not a child of this process, which cannot wait for it.


class _Kept:
    """The fork server that no loader uses, and that has imported people's code: at most one."""

    def __init__(self) -> None:
        self._servers: deque[RunningServer] = deque()  # Its methods are atomic: any thread may free a loader.
        self._is_exiting = False
        call_at_fork(self, after_in_child=_Kept.leave_to_parent)
        atexit.register(self.exit)

    def take(self, setup: WorkerSetup) -> RunningServer | None:
        """Return the fork server if it is as good as a new one; otherwise, end it."""
        if not setup.runs_user_code or (running := self._pop()) is None:
            return None
        if running.is_usable(setup):
            return running
        running.close(CLOSE_S)
        return None

    def keep(self, running: RunningServer) -> None:
        """Keep a fork server, and end the one before. Nothing is kept while Python exits."""
        if self._is_exiting:
            running.close(CLOSE_S)
            return
        self.end()
        self._servers.append(running)

    def end(self) -> None:
        """End the fork server."""
        while (running := self._pop()) is not None:
            running.close(CLOSE_S)

    def exit(self) -> None:
        """End the fork server because Python exits."""
        self._is_exiting = True
        self.end()

    def leave_to_parent(self) -> None:
        """Forget it in a forked child."""
        while (running := self._pop()) is not None:
            running.leave_to_parent()

    def _pop(self) -> RunningServer | None:
        try:
            return self._servers.popleft()
        except IndexError:
            return None


_kept = _Kept()


def start_server(setup: WorkerSetup) -> RunningServer:
    """Return the fork server that was kept, or a new one."""
    return _kept.take(setup) or _start(setup)


def release(running: RunningServer) -> None:
    """Keep a fork server that no loader uses any more for the next one, or end it."""
    if os.getpid() != running.owner_id:
        return
    if running.surroundings is None or running.process.poll() is not None:
        running.close(CLOSE_S)
    else:
        _kept.keep(running)


def end_kept() -> None:
    """End the fork server that is kept for the next loader, if there is one."""
    _kept.end()


def _start(setup: WorkerSetup) -> RunningServer:
    end, theirs = make_pair()
    try:
        with theirs:
            surroundings = find_surroundings() if setup.runs_user_code else None
            process = _start_process(theirs.fileno(), setup)
        end.setblocking(False)
    except BaseException:  # Ctrl-C must not leave it open either.
        end.close()
        raise
    return RunningServer(process=process, end=end, surroundings=surroundings)


def _start_process(descriptor: int, setup: WorkerSetup) -> subprocess.Popen[bytes]:
    # Libraries would start a thread for each core. A fork server must have no threads, and decode threads already keep
    # all cores busy.
    environment = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OPENCV_FOR_THREADS_NUM", "OMP_NUM_THREADS"), "1")
    if setup.runs_user_code:
        environment |= {name: value for name, value in REUSE_OF_MEMORY.items() if name not in os.environ}
    return start_process(
        "shardio.loader.processes.fork_server_process:main",
        [descriptor, os.getpid()],
        environment=environment,
        descriptors=[descriptor],
        # Readers hold absolute paths, and this directory may be gone. But people's code may open files.
        cwd=None if setup.runs_user_code else "/",
        stdout=None,  # People print in their transforms.
    )
