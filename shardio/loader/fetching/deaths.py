"""The error for a worker process that has died: its signal, the likely cause and the remedy."""

from __future__ import annotations

import signal
from multiprocessing.process import BaseProcess

from shardio.errors import WorkerError
from shardio.loader.processes.deaths import describe_exit

JOIN_S = 5.0
"""How long to wait for a process that has closed its connection."""


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
