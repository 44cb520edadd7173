"""Pack shards on a Ray cluster: one task for each shard."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shardio.errors import PackError
from shardio.packing.packed_shard import PackedShard
from shardio.packing.progress import PackProgress
from shardio.packing.shard_job import ShardJob, pack_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRay:
    """The executor that packs on a Ray cluster: see :class:`~shardio.packing.executors.choosing.PackExecutor`.

    All machines of the cluster must see the source and the destination under the same paths, and have the same version
    of shardio. If this process is already connected to a cluster, that one is used.

    Attributes:
        address: The address of the cluster; None to start Ray on this machine.
        num_workers: How many shards are packed at a time; None for one for each processor of the cluster.
    """

    address: str | None
    num_workers: int | None

    def __call__(self, jobs: Iterator[ShardJob], progress: PackProgress) -> Generator[tuple[int, PackedShard]]:
        ray = import_ray()
        is_ours = not ray.is_initialized()
        if is_ours:
            _connect(ray, self.address)
        try:
            num_at_once = self.num_workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
            yield from _run(ray, num_at_once, jobs, progress)
        finally:
            if is_ours:
                ray.shutdown()


def import_ray() -> Any:
    """Return the ray module.

    Raises:
        PackError: If Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise PackError(
            f"--engine ray (engine='ray') needs Ray ({error}): pip install 'shardio-loader[ray]'"
        ) from error
    return ray


def _connect(ray: Any, address: str | None) -> None:
    options = {"address": address} if address else {"include_dashboard": False}
    try:
        ray.init(**options, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise PackError(f"cannot connect to the Ray cluster {address or 'on this machine'}: {error}") from error


def _run(
    ray: Any, num_at_once: int, jobs: Iterator[ShardJob], progress: PackProgress
) -> Generator[tuple[int, PackedShard]]:
    """Keep ``num_at_once`` tasks in flight until all jobs are done."""
    task = ray.remote(num_cpus=1)(_pack)
    in_flight = {task.remote(job): job for job in islice(jobs, num_at_once)}
    try:
        while in_flight:
            (done,), _ = ray.wait(list(in_flight), num_returns=1)
            job = in_flight.pop(done)
            shard = _get(ray, done)
            if (following := next(jobs, None)) is not None:
                in_flight[task.remote(following)] = following
            progress.packed(len(job.samples), shard.entry.num_bytes)
            yield job.number, shard
    finally:
        for each in in_flight:
            ray.cancel(each, force=True)


def _pack(job: ShardJob) -> PackedShard:
    return pack_shard(job, lambda num_samples, num_bytes: None)


def _get(ray: Any, done: Any) -> PackedShard:
    """Return the result of a task; raise the error that ended it."""
    try:
        shard: PackedShard = ray.get(done)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise PackError(
            f"a Ray task failed: {error}. Rerun the same command to resume: finished shards are kept"
        ) from error
    return shard
