"""The rank of this process among the training processes, and its worker ID inside the rank.

No other module reads the rank from torch.distributed or torchrun's variables, or calls torch's ``get_worker_info``.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardio.values import check_integer

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank among ``world_size`` training processes."""

    rank: int
    world_size: int

    def __post_init__(self) -> None:
        for name in ("rank", "world_size"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name)))
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank must be at least 0 and below world_size, got {self.rank} of {self.world_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One of the ``num_workers`` workers of a rank; worker 0 of 1 outside of workers.

    Attributes:
        worker_id: The worker's number.
        num_workers: The number of workers of the loader.
        loader_seed: The seed that torch's loader drew for its workers; 0 in the training process.
    """

    worker_id: int
    num_workers: int
    loader_seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRng:
    """The random number generators of a worker thread, seeded as torch seeds those of a worker process.

    Threads share the global generators, so code that draws from them is not reproducible in worker threads.

    Attributes:
        random_generator: Python's generator.
        torch_generator: torch's generator.
        numpy_generator: numpy's generator.
    """

    random_generator: random.Random
    torch_generator: torch.Generator
    numpy_generator: np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Information about a worker thread. The attributes have the same names as in torch's WorkerInfo.

    Attributes:
        id: The worker's number.
        num_workers: The number of workers of the loader.
        seed: The seed of ``rng``.
        dataset: The loader's dataset, which all workers share; for an iterable dataset, this worker's copy.
        rng: The worker's own random number generators.
        worker_method: "thread".
    """

    id: int
    num_workers: int
    seed: int
    dataset: Any
    rng: WorkerRng
    worker_method: str = "thread"


class _Thread(threading.local):
    info: WorkerInfo | None = None
    has_asked: bool = False


_thread = _Thread()


def get_worker_info() -> Any:
    """Return the DataLoader worker (process or thread) that calls this function; None outside of workers.

    In worker processes, this function returns the result of torch's ``get_worker_info``. In worker threads, where
    torch's function returns None, this function returns a :class:`WorkerInfo`.
    """
    if _thread.info is not None:
        _thread.has_asked = True
        return _thread.info
    import torch.utils.data

    return torch.utils.data.get_worker_info()


@contextmanager
def being_worker(info: WorkerInfo) -> Iterator[None]:
    """Make this thread a worker while the block runs."""
    _thread.info = info
    try:
        yield
    finally:
        _thread.info = None


def has_asked() -> bool:
    """Return whether :func:`get_worker_info` was called in this worker thread."""
    return _thread.has_asked


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedWorld:
    """The world that a process found, to pass to the workers that it starts.

    torch.distributed is not initialized in spawned workers, so each worker would find rank 0 of 1. Only workers that
    the process itself starts use its world: a launcher's world does not apply to the workers of its ranks.
    """

    world: World
    process_id: int

    @classmethod
    def find(cls) -> CarriedWorld:
        """Return this process's world, to pass to its workers."""
        return cls(world=find_world(), process_id=os.getpid())

    def is_for_here(self) -> bool:
        """Return whether this process is a torch worker that was started by the process that found the world."""
        parent = multiprocessing.parent_process()
        return is_torch_worker() and parent is not None and parent.pid == self.process_id


def find_world(rank: int | None = None, world_size: int | None = None, *, carried: CarriedWorld | None = None) -> World:
    """Return the world from the arguments, torch.distributed or torchrun's variables; by default, rank 0 of 1.

    Raises:
        ValueError: If only one of rank and world size is given or set in the environment, or the rank is out of range.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"pass both rank and world_size, or neither; got rank={rank} and world_size={world_size}")
    if rank is not None and world_size is not None:
        return World(rank=rank, world_size=world_size)
    if carried is not None and carried.is_for_here():
        return carried.world
    if "torch.distributed" in sys.modules:  # Otherwise, this process has joined no group.
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return World(rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return World(rank=_read_variable("RANK"), world_size=_read_variable("WORLD_SIZE"))
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in os.environ:
            raise ValueError(
                f"the environment variable {name} is {os.environ[name]!r}, but {other} is not set and both are needed: "
                f"start with torchrun, which sets RANK and WORLD_SIZE, or unset {name}"
            )
    return World(rank=0, world_size=1)


def find_world_size() -> int:
    """Return the number of ranks; 1 if :func:`find_world` would raise an error."""
    try:
        return find_world().world_size
    except ValueError:
        return 1


def choose_world(
    rank: int | None, world_size: int | None, *, mesh: DeviceMesh | None = None, group: ProcessGroup | None = None
) -> World | None:
    """Return the world that the user chose, or None if no argument is given.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        mesh: A DeviceMesh with one dimension, whose ranks read different samples.
        group: A process group whose ranks read different samples.

    Raises:
        ValueError: If the arguments contradict each other, the mesh has several dimensions, or this process is not in
            the mesh or group.
    """
    chosen = {"rank": rank if rank is not None else world_size, "mesh": mesh, "group": group}
    names = [name for name, value in chosen.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"got {' and '.join(names)}: pass either rank and world_size, or mesh, or group")
    if mesh is not None:
        if mesh.ndim != 1:
            raise ValueError(_describe_dims(mesh))
        if mesh.get_coordinate() is None:
            raise _not_in("mesh")
        group = mesh.get_group()
    if group is None:
        return None if not names else find_world(rank, world_size)
    import torch.distributed

    rank, world_size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    if rank < 0:
        raise _not_in("group")
    return World(rank=rank, world_size=world_size)


def _describe_dims(mesh: DeviceMesh) -> str:
    dims = mesh.mesh_dim_names
    if dims is None:
        return (
            f"the mesh has {mesh.ndim} dimensions: pass the group of the dimension whose ranks read different "
            "samples, such as group=mesh.get_group(0)"
        )
    return (
        f"the mesh has {mesh.ndim} dimensions ({', '.join(dims)}): pass the dimension whose ranks read different "
        f"samples, such as mesh=mesh[{dims[0]!r}]. Join several with mesh[{dims[0]!r}, …]._flatten()"
    )


def _not_in(what: str) -> ValueError:
    import torch.distributed

    return ValueError(
        f"rank {torch.distributed.get_rank()} is not in the {what}: create datasets only on ranks that read data"
    )


def find_data_world(*, carried: CarriedWorld | None = None) -> World:
    """Return the world as :func:`find_world` does, if all of its ranks read different samples.

    Raises:
        RuntimeError: If it is unclear which ranks read different samples, because there is a mesh with several
            dimensions. Under tensor, pipeline or context parallelism, the ranks of one replica must read the same
            samples.
    """
    if (carried is None or not carried.is_for_here()) and (dims := _find_small_dims()):
        raise RuntimeError(
            f"there is a DeviceMesh with several dimensions ({', '.join(dims)}), so it is not clear which ranks read "
            "different samples. Pass the data-parallel dimension (e.g. mesh=mesh['dp']) to the dataset, EpochSampler "
            "or CoverageRecorder; if all ranks read different samples, pass group=torch.distributed.group.WORLD instead"
        )
    return find_world(carried=carried)


def _find_small_dims() -> list[str]:
    """Return the names of the mesh dimensions that have fewer ranks than the world.

    A mesh with such a dimension also has other dimensions, even if these have only one rank each.
    """
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    from torch.distributed import distributed_c10d

    # torch keeps no list of meshes. Each dimension has a process group, whose description begins with "mesh_"; a
    # dimension with all ranks has the default group.
    groups = getattr(distributed_c10d._world, "pg_map", {})
    small = [group for group in groups if group.size() < torch.distributed.get_world_size()]
    described = (str(getattr(group, "group_desc", "")) for group in small)
    return sorted({name.removeprefix("mesh_") for name in described if name.startswith("mesh_")})


def _read_variable(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(
            f"the environment variable {name} must be an integer, got {os.environ[name]!r}: start with torchrun or "
            f"unset {name}"
        ) from None


def find_local_rank() -> int | None:
    """Return the rank of this process on its machine, set by torchrun; None without torchrun."""
    return _read_variable("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None


def find_local_world_size() -> int:
    """Return the number of training processes on this machine, set by torchrun; 1 without torchrun."""
    return max(1, _read_variable("LOCAL_WORLD_SIZE")) if "LOCAL_WORLD_SIZE" in os.environ else 1


def find_worker() -> Worker:
    """Return the worker that calls this function; worker 0 of 1 outside of workers."""
    info = get_worker_info()
    return Worker(worker_id=0, num_workers=1) if info is None else _describe(info)


def find_worker_over(dataset: object) -> Worker | None:
    """Return the calling worker if its loader's dataset is exactly this object, else None."""
    info = get_worker_info()
    return None if info is None or info.dataset is not dataset else _describe(info)


def is_torch_worker() -> bool:
    """Return whether this process or thread is a worker that calls the dataset, as torch's workers do."""
    return get_worker_info() is not None


def _describe(info: Any) -> Worker:
    # torch seeds each worker with the sum of the loader's seed and the worker's ID.
    return Worker(worker_id=info.id, num_workers=info.num_workers, loader_seed=info.seed - info.id)
