"""In how many threads torch computes on a CPU."""

from __future__ import annotations

import os

import torch

from shardio.processors import count_processors
from shardio.world import find_local_world_size

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What users set for torch; torchrun sets the first to 1 where it starts several ranks."""


def choose_threads(num_processors: int, num_ranks: int, num_workers: int) -> int:
    """Return in how many threads each of a machine's ranks computes beside the workers of its loader, at least 1.

    torch takes all processors. Its threads wait for each other at each operation, and spin meanwhile: where one finds
    its processor busy, with decoding or anything else, all wait for it and burn their time.

    >>> choose_threads(8, 1, 2), choose_threads(8, 2, 2), choose_threads(2, 1, 2)
    (6, 2, 1)
    """
    return max(1, num_processors // num_ranks - num_workers)


def set_threads(num_workers: int, device: torch.device, num_before: int) -> str | None:
    """Leave processors to the loader's workers, if torch computes on a CPU and the user has not chosen.

    Args:
        num_workers: The loader's.
        device: Where the training computes.
        num_before: torch's threads when the process began. If there is another number by now, it is a choice.

    Returns:
        What was done, in a line for the user; None if nothing was.
    """
    if device.type != "cpu" or torch.get_num_threads() != num_before or any(map(os.environ.get, VARIABLES)):
        return None
    num_processors, num_ranks = count_processors(), find_local_world_size()
    num_threads = choose_threads(num_processors, num_ranks, num_workers)
    if num_threads >= num_before:  # torch counts cores, of which each may be two processors.
        return None
    torch.set_num_threads(num_threads)
    return (
        f"torch computes in {num_threads} of its {num_before} threads and leaves processors to the loader "
        f"(processors: {num_processors}, ranks: {num_ranks}, workers: {num_workers}): choose by --threads or "
        "OMP_NUM_THREADS"
    )
