"""Executors: they pack the shards of a plan here, in worker processes, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Literal, Protocol

from shardio.packing.packed_shard import PackedShard
from shardio.packing.plan import PackSettings
from shardio.packing.progress import PackProgress
from shardio.packing.shard_job import ShardJob, pack_shard
from shardio.packing.sources.records import close_records
from shardio.processors import count_processors

Engine = Literal["processes", "ray"]
"""Where shards are packed: in processes of this machine, or on a Ray cluster."""

MAX_WORKERS = 16
"""The maximum number of worker processes, unless the caller chooses a number."""

BYTES_PER_WORKER = {"copied": 128 * 2**20, "decoded": 16 * 2**20}
"""How many bytes make another worker process worth its start, mostly the import of packages."""


class PackExecutor(Protocol):
    """Packs shards."""

    def __call__(self, jobs: Iterator[ShardJob], progress: PackProgress) -> Generator[tuple[int, PackedShard]]:
        """Pack shards and yield each one with its number when it is finished, in any order.

        Jobs are made when they are needed. When the iterator is closed or raises, no process packs any more.

        Raises:
            PackError, FileChangedError, OSError: The first error of a job.
        """


def pack_here(jobs: Iterator[ShardJob], progress: PackProgress) -> Generator[tuple[int, PackedShard]]:
    """Pack one shard after the other in this process. See :class:`PackExecutor`."""
    try:
        for job in jobs:
            yield job.number, pack_shard(job, progress.packed)
    finally:
        close_records()


def choose_executor(
    engine: Engine,
    num_workers: int | None,
    num_shards: int,
    num_bytes: int,
    settings: PackSettings,
    ray_address: str | None = None,
) -> PackExecutor:
    """Return the executor for a pack.

    Args:
        engine: Where to pack.
        num_workers: The number of worker processes that the caller chose; None to choose one.
        num_shards: The number of shards.
        num_bytes: The size of all files in bytes.
        settings: The settings of the pack.
        ray_address: The address of the Ray cluster; None to start Ray on this machine.
    """
    if engine == "ray":
        from shardio.packing.executors.on_ray import OnRay, import_ray

        import_ray()
        return OnRay(address=ray_address, num_workers=num_workers)
    if num_workers is None:
        does_decode = settings.check or settings.jpeg != "copy" or settings.convert_to is not None
        worth = num_bytes // BYTES_PER_WORKER["decoded" if does_decode else "copied"]
        num_workers = min(MAX_WORKERS, count_processors(), worth)
    num_workers = min(num_workers, num_shards)
    if num_workers <= 1:
        return pack_here
    from shardio.packing.executors.worker_processes import InProcesses  # It imports multiprocessing.

    return InProcesses(num_workers=num_workers)
