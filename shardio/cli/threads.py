"""The number of torch's CPU threads. No other module chooses it."""

from __future__ import annotations

import os

import torch

from shardio.processors import count_processors
from shardio.world import find_local_world_size

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables with which users set torch's threads. torchrun sets the first to 1 if it starts several ranks."""


def choose_threads(num_processors: int, num_ranks: int, num_workers: int) -> int:
    """Return how many torch threads each rank of a machine uses in addition to its loader's workers, at least 1.

    By default, torch uses all processors. After each operation, its threads wait in a busy loop until all of them have
    finished, so one thread on a busy processor delays all others.

    >>> choose_threads(8, 1, 2), choose_threads(8, 2, 2), choose_threads(2, 1, 2)
    (6, 2, 1)
    """
    return max(1, num_processors // num_ranks - num_workers)


def leave_processors_to_workers(num_workers: int, device: torch.device, num_before: int) -> str | None:
    """Reduce torch's threads if it computes on a CPU and the user has not chosen their number.

    Args:
        num_workers: The number of the loader's workers.
        device: Where torch computes.
        num_before: The number of torch's threads when the process started. A different number now is the user's choice.

    Returns:
        A message about the change; None if nothing changed.
    """
    if device.type != "cpu" or torch.get_num_threads() != num_before or any(map(os.environ.get, VARIABLES)):
        return None
    num_processors, num_ranks = count_processors(), find_local_world_size()
    num_threads = choose_threads(num_processors, num_ranks, num_workers)
    if num_threads >= num_before:  # torch counts cores, each of which may be two processors.
        return None
    torch.set_num_threads(num_threads)
    return (
        f"torch uses {num_threads} of its {num_before} threads and leaves processors to the loader (processors: "
        f"{num_processors}, ranks: {num_ranks}, workers: {num_workers}): change this with --threads or OMP_NUM_THREADS"
    )
