"""Who this process is: its rank among the training processes, and its worker number inside the rank.

The only reader of torch.distributed, of torchrun's variables and of ``get_worker_info``.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass

from shardio.values import check_integer


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
    """One of ``num_workers`` worker processes of a rank; 0 of 1 in the training process itself."""

    worker_id: int
    num_workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedWorld:
    """The world as one process found it, for the workers that it starts.

    In workers that were not forked torch.distributed is not initialised, and each would take itself for rank
    0 of 1. Only direct workers of that process go by it: a launcher's world is not that of its ranks' workers.
    """

    world: World
    process_id: int

    @classmethod
    def find(cls) -> CarriedWorld:
        """Return this process's world."""
        return cls(world=find_world(), process_id=os.getpid())

    def is_for_here(self) -> bool:
        """Say whether this process is a torch worker that the finding process started."""
        import torch.utils.data

        parent = multiprocessing.parent_process()
        return torch.utils.data.get_worker_info() is not None and parent is not None and parent.pid == self.process_id


def find_world(rank: int | None = None, world_size: int | None = None, *, carried: CarriedWorld | None = None) -> World:
    """Return the world: as given, else as carried, else torch.distributed's, else torchrun's, else 0 of 1.

    Raises:
        ValueError: If only one of the two is given or set in the environment, or the rank is out of range.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, got rank={rank} and world_size={world_size}")
    if rank is not None and world_size is not None:
        return World(rank=rank, world_size=world_size)
    if carried is not None and carried.is_for_here():
        return carried.world
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return World(rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return World(rank=_read_variable("RANK"), world_size=_read_variable("WORLD_SIZE"))
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name in os.environ:
            raise ValueError(
                f"the environment variable {name} is {os.environ[name]!r} and {other} is not set, so it is not known "
                "which of how many training processes this is: start with torchrun, which sets RANK and WORLD_SIZE, "
                f"or unset {name}"
            )
    return World(rank=0, world_size=1)


def _read_variable(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise ValueError(
            f"the environment variable {name} must be an integer, got {os.environ[name]!r}: start with torchrun, or "
            f"unset {name}"
        ) from None


def find_local_rank() -> int | None:
    """Return which of the training processes of its machine this is, as torchrun says; None without it."""
    return _read_variable("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None


def find_local_world_size() -> int:
    """Return how many training processes its machine has, as torchrun says; 1 without it."""
    return max(1, _read_variable("LOCAL_WORLD_SIZE")) if "LOCAL_WORLD_SIZE" in os.environ else 1


def find_worker() -> Worker:
    """Return which of the rank's torch worker processes this is."""
    import torch.utils.data

    info = torch.utils.data.get_worker_info()
    return (
        Worker(worker_id=0, num_workers=1) if info is None else Worker(worker_id=info.id, num_workers=info.num_workers)
    )
