"""The error for a worker process that has died: its signal, the likely cause and the remedy."""

from __future__ import annotations

import signal
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardio.errors import WorkerError
from shardio.loader.processes.deaths import describe_exit

JOIN_S = 5.0
"""How long to wait for a process that has closed its connection."""


STOPPED_S = 30.0
"""How long a worker process may be stopped, as by SIGSTOP, while the loader waits for it."""


def is_stopped(process_id: int) -> bool:
    """Return whether a signal has stopped a process; false where the operating system does not tell."""
    with suppress(OSError):
        status = Path(f"/proc/{process_id}/stat").read_bytes()  # proc(5): after the name comes the state.
        return status.rpartition(b")")[2].split()[0] == b"T"
    return False


def describe_stop(process: BaseProcess) -> WorkerError:
    """Return the error for a worker process that does not continue after it was stopped."""
    return WorkerError(
        f"DataLoader worker (pid(s) {process.pid}) has been stopped by a signal for {STOPPED_S:.0f} s, so its batch "
        "does not arrive. Iterate over the loader again. If a job must be suspended, suspend all of its processes"
    )


def describe_death(process: BaseProcess) -> WorkerError:
    """Return the error for a worker process that has closed its end."""
    process.join(JOIN_S)
    code = process.exitcode
    what = f"DataLoader worker (pid(s) {process.pid}) exited unexpectedly"
    if code is None:
        return WorkerError(f"{what}: it closed its connection but still runs; it may have closed all of its files")
    what = f"{what}: {describe_exit(f'DataLoader worker (pid {process.pid})', code)}"
    if code >= 0:
        return WorkerError(f"{what}. Standard error may show why. Use num_workers=0 to debug")
    causes: dict[int, str] = {
        signal.SIGKILL: "Memory has probably run out: use fewer workers, a smaller prefetch_factor or smaller batches",
        signal.SIGBUS: "Shared memory has probably run out: use fewer workers or smaller batches, or give the "
        "container more memory (docker run --memory, and --shm-size if the dataset shares tensors itself)",
        signal.SIGSEGV: "A library crashed in the dataset or collate_fn: use num_workers=0 and faulthandler to find it",
    }
    return WorkerError(f"{what}. {causes.get(-code, 'Another process may have ended it')}")
