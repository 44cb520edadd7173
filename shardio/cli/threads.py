"""The threads in which torch computes on a CPU: the only place that chooses their number."""

from __future__ import annotations

import os

import torch

from shardio.processors import count_processors
from shardio.world import find_local_world_size

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which users choose torch's threads. torchrun sets the first to 1 if it starts several ranks."""


def choose_threads(num_processors: int, num_ranks: int, num_workers: int) -> int:
    """Return how many threads each rank of a machine uses next to its loader's workers, at least 1.

    By default torch uses all processors. Its threads wait for each other after each operation, and spin meanwhile: if
    one of them finds its processor busy, all waste their time.

    >>> choose_threads(8, 1, 2), choose_threads(8, 2, 2), choose_threads(2, 1, 2)
    (6, 2, 1)
    """
    return max(1, num_processors // num_ranks - num_workers)


def leave_processors_to_workers(num_workers: int, device: torch.device, num_before: int) -> str | None:
    """Reduce torch's threads if it computes on a CPU and the user has not chosen their number.

    Args:
        num_workers: Workers of the loader.
        device: Where torch computes.
        num_before: torch's threads when the process started. If they have changed since, that was a choice.

    Returns:
        A message that says what changed; None if nothing did.
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
