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


def start_server(setup: WorkerSetup) -> RunningServer:
    """Return a new fork server, or the one that was kept."""
    return _take_kept(setup) or _start(setup)


class _Kept:
    """At most one fork server that has imported people's code and that no loader uses."""

    def __init__(self) -> None:
        self.servers: deque[RunningServer] = deque()  # Its methods are atomic: any thread may free a loader.
        self.is_exiting = False
        call_at_fork(self, after_in_child=_Kept.leave_to_parent)
        atexit.register(self.end)

    def leave_to_parent(self) -> None:
        """Forget it in a forked child."""
        while self.servers:
            self.servers.pop().leave_to_parent()

    def end(self) -> None:
        """End it when Python exits, and keep no other."""
        self.is_exiting = True
        end_kept()


_kept = _Kept()


def end_kept() -> None:
    """End the fork server that is kept for the next loader, if there is one."""
    while (running := _pop_kept()) is not None:
        running.close(CLOSE_S)


def _pop_kept() -> RunningServer | None:
    try:
        return _kept.servers.popleft()
    except IndexError:
        return None


def _take_kept(setup: WorkerSetup) -> RunningServer | None:
    """Return the fork server that is kept, if it is as good as a new one; otherwise, end it."""
    if not setup.runs_user_code or (running := _pop_kept()) is None:
        return None
    if running.is_usable(setup):
        return running
    running.close(CLOSE_S)
    return None


def release(running: RunningServer) -> None:
    """Keep a fork server that no ForkServer has any more, or end it."""
    if os.getpid() != running.owner_id:
        return
    if running.surroundings is None or _kept.is_exiting:
        running.close(CLOSE_S)
        return
    end_kept()
    _kept.servers.append(running)


def _start(setup: WorkerSetup) -> RunningServer:
    end, theirs = make_pair()
    try:
        with theirs:
            surroundings = find_surroundings() if setup.runs_user_code else None
            # Readers hold absolute paths, and this directory may be gone. But people's code may open files.
            process = _start_process(theirs.fileno(), None if setup.runs_user_code else "/")
        end.setblocking(False)
    except BaseException:  # Ctrl-C must not leave it open either.
        end.close()
        raise
    return RunningServer(process=process, end=end, surroundings=surroundings)


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
