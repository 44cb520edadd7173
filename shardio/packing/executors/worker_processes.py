"""Pack shards in worker processes. Each packs one shard at a time."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from shardio.background import start_process
from shardio.errors import PackError
from shardio.packing.packed_shard import PackedShard
from shardio.packing.progress import PackProgress
from shardio.packing.shard_job import ShardJob

END_WITHIN_S = 10.0
"""Seconds in which a worker process ends after it was told to. It only has to remove one unfinished file."""

SILENT_S, LAST_CHANCE_S = 60.0, 20.0
"""A worker process counts as suspended if it does not report for these two times together, in seconds. The second one
starts again if this process itself was suspended. A worker process that works reports every few seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Worker:
    """A worker process and the connection to it, over which jobs go and reports and shards come."""

    process: subprocess.Popen[bytes]
    connection: Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class InProcesses:
    """The executor that packs in worker processes: see :class:`~shardio.packing.executors.choosing.PackExecutor`."""

    num_workers: int

    def __call__(self, jobs: Iterator[ShardJob], progress: PackProgress) -> Generator[tuple[int, PackedShard]]:
        workers = list[_Worker]()
        try:
            for job in jobs:
                if len(workers) == self.num_workers:
                    break
                workers.append(_start_worker())
                workers[-1].connection.send(job)
            else:
                job = None
            yield from _run(workers, job, jobs, progress)
        finally:
            _end(workers)


def _run(
    workers: list[_Worker], next_job: ShardJob | None, jobs: Iterator[ShardJob], progress: PackProgress
) -> Generator[tuple[int, PackedShard]]:
    """Give each worker its next job when it has finished one, until all jobs are done."""
    busy: dict[Any, _Worker] = {worker.connection: worker for worker in workers}
    heard_at = dict.fromkeys(busy, time.monotonic())
    while busy:
        for connection in wait(list(busy), SILENT_S):
            worker, heard_at[connection] = busy[connection], time.monotonic()
            kind, *values = _receive(worker)
            if kind == "report":
                progress.packed(*values)
                continue
            if kind == "error":
                raise values[0]
            if next_job is not None:
                worker.connection.send(next_job)
                next_job = next(jobs, None)
            else:
                del busy[connection]
            yield values[0], values[1]
        for connection, worker in busy.items():
            if time.monotonic() - heard_at[connection] > SILENT_S and not connection.poll(LAST_CHANCE_S):
                worker.process.kill()
                raise PackError(
                    f"the worker process {worker.process.pid} has not reported for more than {SILENT_S:g} s, so it was "
                    "ended: it was suspended, or it waited for a disk. Rerun the same command to resume: finished "
                    "shards are kept"
                )


def _start_worker() -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        process = start_process(
            "shardio.packing.executors.worker_process:main", [theirs.fileno()], descriptors=[theirs.fileno()]
        )
    return _Worker(process=process, connection=Connection(ours.detach()))


def _receive(worker: _Worker) -> Any:
    try:
        return worker.connection.recv()
    except (EOFError, ConnectionError) as error:
        code = worker.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        raise PackError(
            f"a worker process {how}. If the system ran out of memory, use fewer workers (--num-workers, num_workers). "
            "Rerun the same command to resume: finished shards are kept"
        ) from error


def _end(workers: list[_Worker]) -> None:
    """End the worker processes. One that is packing removes its unfinished file first."""
    for worker in workers:
        worker.connection.close()
    deadline = time.monotonic() + END_WITHIN_S
    for worker in workers:
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(max(0.0, deadline - time.monotonic()))
        if worker.process.returncode is None:
            worker.process.kill()
            worker.process.wait()
