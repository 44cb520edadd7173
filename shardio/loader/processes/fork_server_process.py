"""A fork server: the process from which all worker processes of a pool are forked, and those of the pools after it.

It imports what they need and reads their setup once. A fork then takes 1 ms instead of the 150 ms of the imports, and
worker processes share the memory of both. It has one thread, so that its forks are safe. It ends, and ends all worker
processes, as soon as the other end of its socket pair is closed.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from io import TextIOWrapper

from shardio.images import find_kernel
from shardio.loader.failures import Failure
from shardio.loader.processes.messages import (
    AllWorkersEnded,
    EndAllWorkers,
    EndWorker,
    StartWorker,
    WorkerEnded,
    WorkerSetup,
)
from shardio.loader.processes.setup import load_setup
from shardio.loader.processes.wire import receive_all, send
from shardio.loader.processes.worker_process import run_worker_process

CHECK_EXIT_S = 0.01
"""How often the fork server checks whether a worker process that should exit has done so."""


class ForkServerProcess:
    """The state of a fork server.

    Args:
        end: The end of its socket pair.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._process_ids: dict[int, int] = {}  # Of worker processes that were not waited for, by worker id.

    def run(self, parent_id: int) -> None:
        """Start and end worker processes until the other end is closed, or the process ``parent_id`` has ended."""
        setup: WorkerSetup | Failure | None = None
        for message, descriptors in receive_all(self._end, parent_id):
            match message:
                case bytes() | bytearray():
                    setup = None  # Not two at a time.
                    setup = _load(message)
                case StartWorker():
                    assert setup is not None, "it is the first message"
                    with socket.socket(fileno=descriptors[0]) as end:
                        self._process_ids[message.worker_id] = self._fork(end, setup, message.num_threads)
                case EndWorker():
                    process_id = self._process_ids.pop(message.worker_id)
                    code = _end_process(process_id, message.patience_s)
                    send(self._end, WorkerEnded(process_id=process_id, exit_code=code))
                case EndAllWorkers():
                    self.end_all()
                    if isinstance(setup, Failure):
                        return  # The next pool gets a new process, which imports people's modules again.
                    send(self._end, AllWorkersEnded())

    def end_all(self) -> None:
        """Kill all worker processes."""
        for process_id in self._process_ids.values():
            os.kill(process_id, signal.SIGKILL)
        for process_id in self._process_ids.values():
            os.waitpid(process_id, 0)
        self._process_ids.clear()

    def _fork(self, end: socket.socket, setup: WorkerSetup | Failure, num_threads: int) -> int:
        server_id, process_id = os.getpid(), os.fork()
        if process_id == 0:
            self._end.close()  # Only the fork server may keep it open.
            run_worker_process(end, setup, num_threads, server_id)
        return process_id


def _load(content: bytes | bytearray) -> WorkerSetup | Failure:
    """Return the setup, and prepare the memory that worker processes are going to share."""
    if gc.get_freeze_count():  # A setup before this one may have left cycles.
        gc.unfreeze()
        gc.collect()
    gc.disable()  # Looking for cycles takes 5 ms here, and imports leave few behind.
    setup = load_setup(content)
    if isinstance(setup, WorkerSetup) and setup.decoder.image_names:
        find_kernel()  # It is loaded once for all worker processes.
    # The collector of cycles would write to all objects, and pages that are written to are not shared.
    gc.freeze()
    gc.enable()
    return setup


def _end_process(process_id: int, patience_s: float) -> int:
    """Wait until a child exits, kill it after ``patience_s``, and return its exit code."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process_id, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(CHECK_EXIT_S)  # waitpid has no timeout.
    os.kill(process_id, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def main() -> None:
    """Run a fork server. The command line names the descriptor of its socket and the parent process."""
    descriptor, parent_id = map(int, sys.argv[1:])
    if isinstance(sys.stdout, TextIOWrapper):  # It is None if standard output is closed.
        sys.stdout.reconfigure(line_buffering=True)  # Worker processes are killed and would not write what is left.
    server = ForkServerProcess(socket.socket(fileno=descriptor))
    try:
        with suppress(ConnectionError, StopIteration):  # The other end was closed, perhaps before the first message.
            server.run(parent_id)
    finally:
        server.end_all()
    os._exit(0)  # Taking the interpreter apart takes longer than several forks.
