"""The random numbers of workers: the same seeds as in torch's workers."""

from __future__ import annotations

import random

import numpy as np
import torch

from shardio.world import WorkerRng


def seed_process(base_seed: int, worker_id: int) -> None:
    """Seed the global generators of Python, torch and numpy of a worker process."""
    random.seed(base_seed + worker_id)
    torch.manual_seed(base_seed + worker_id)
    np.random.seed(_find_numpy_seed(base_seed, worker_id))  # People's code draws from it.


def make_rng(base_seed: int, worker_id: int) -> WorkerRng:
    """Return the generators of a worker that shares its process with others."""
    seed = base_seed + worker_id
    return WorkerRng(
        random_generator=random.Random(seed),
        torch_generator=torch.Generator().manual_seed(seed),
        numpy_generator=np.random.default_rng(_find_numpy_seed(base_seed, worker_id)),
    )


def _find_numpy_seed(base_seed: int, worker_id: int) -> list[int]:
    """Return uint32 [4]. torch computes the same words, by numpy's SeedSequence with this entropy."""
    entropy = (worker_id, base_seed & 0xFFFFFFFF, base_seed >> 32, 0)
    words: list[int] = np.random.SeedSequence(entropy).generate_state(4).tolist()
    return words
