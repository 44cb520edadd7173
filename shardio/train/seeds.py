"""Random numbers and algorithms: what must be the same for two runs to be the same."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(*words: int) -> None:
    """Seed torch on all devices, numpy and Python's ``random`` by a seed and what it is for, such as rank and epoch.

    >>> seed_everything(7)
    >>> first = torch.rand(3), np.random.rand(), random.random()
    >>> seed_everything(7)
    >>> bool((torch.rand(3) == first[0]).all()), np.random.rand() == first[1], random.random() == first[2]
    (True, True, True)
    """
    numbers = np.random.SeedSequence(words).generate_state(3)
    torch.manual_seed(int(numbers[0]))
    np.random.seed(numbers[1])
    random.seed(int(numbers[2]))


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of this process's generators: of torch, of torch on ``device``, of numpy and of Python."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict), "which is what legacy=False means"
    state = numpy_state["state"]
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        # Plain lists, since only what needs no code is read from checkpoints.
        "numpy": {**numpy_state, "state": {"key": state["key"].tolist(), "pos": int(state["pos"])}},
        "python": random.getstate(),
    }


def load_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore this process's generators to :func:`random_states`."""
    torch.set_rng_state(states["torch"].cpu())
    if states["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"].cpu(), device)
    state = states["numpy"]["state"]
    np.random.set_state({**states["numpy"], "state": {**state, "key": np.array(state["key"], dtype=np.uint32)}})
    random.setstate(states["python"])


@contextmanager
def algorithms(*, deterministic: bool) -> Iterator[None]:
    """Restrict torch to algorithms that always give the same bits, or else allow the fastest for these sizes."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        # cuBLAS wants to be told before it is first used: docs.nvidia.com/cuda/cublas, "Results reproducibility".
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
