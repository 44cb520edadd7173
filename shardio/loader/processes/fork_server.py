"""The training process's side of its fork server, which starts and ends worker processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from contextlib import suppress
from typing import Any

from shardio.background import start_process
from shardio.loader.processes.messages import EndWorker, StartWorker, WorkerEnded, WorkerSetup
from shardio.loader.processes.setup import dump_setup
from shardio.loader.processes.wire import make_pair, receive, send, send_within

CLOSE_S = 5.0
"""How long the fork server may take to end all worker processes and itself before they are killed."""

EXIT_S = 1.0
"""How long a process that closed its end may take to exit. Its own exit code says more than the signal of a kill."""


class ForkServer:
    """A fork server. After it ended, the next worker process starts another one.

    Args:
        setup: What worker processes need before their first chunk.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._end: socket.socket
        self._how_it_ended = "there was no fork server"

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has not been found dead."""
        return self._process is not None

    def start_worker(self, worker_id: int, num_threads: int, patience_s: float) -> socket.socket:
        """Start a worker process and return this side's end of its socket pair. This does not wait for the process.

        If the process cannot start, the other end is closed.

        Args:
            worker_id: Its number, larger than that of every earlier worker process.
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
        if self._process is not None:
            request = EndWorker(worker_id=worker_id, patience_s=EXIT_S if is_exiting else 0.0)
            if (answer := self._ask(request, request.patience_s + patience_s)) is not None:
                return f"worker process {answer.process_id} {_describe_exit(answer.exit_code)}"
            self._end_all(EXIT_S)
        return self._how_it_ended

    def close(self) -> None:
        """End the fork server and all worker processes."""
        if self._process is not None:
            self._end_all(CLOSE_S)

    def leave_to_parent(self) -> None:
        """Close the end in a forked child, so that the fork server does not outlive the parent."""
        if self._process is not None:
            self._end.close()
            self._process.returncode = 0  # It is not a child of this process, which cannot wait for it.

    def _start(self) -> None:
        self._end, theirs = make_pair()
        try:
            with theirs:
                # Readers hold absolute paths, and this directory may be gone. But people's code may open files.
                self._process = _start_process(theirs.fileno(), None if self._setup.decoder.runs_user_code else "/")
        except BaseException:  # Ctrl-C must not leave it open either.
            self._end.close()
            raise
        with suppress(ConnectionError):  # It has died already; the first worker process shows it.
            send(self._end, dump_setup(self._setup))
        self._end.setblocking(False)

    def _ask(self, request: Any, patience_s: float) -> WorkerEnded | None:
        """Return the answer to a request; None if the fork server has died or does not answer in time."""
        answers = select.poll()
        answers.register(self._end, select.POLLIN)
        with suppress(ConnectionError):
            if send_within(patience_s, self._end, request) and answers.poll(1000 * patience_s):
                received = receive(self._end)
                return None if received is None else received[0]
        return None

    def _end_all(self, patience_s: float) -> None:
        """Wait until the fork server has ended all worker processes and itself; kill them after ``patience_s``."""
        process = self._process
        assert process is not None, "it is running"
        with suppress(OSError):  # It has died.
            self._end.shutdown(socket.SHUT_RDWR)  # Closing alone has no effect while another process has a copy.
        self._end.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        # The worker processes are in its group. If it was killed, they are still there, and the group has its number.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._how_it_ended = f"fork server {process.pid} {_describe_exit(process.wait())}"
        self._process = None


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
    )
