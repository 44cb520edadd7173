"""Reproducibility: the states of random generators, and deterministic algorithms."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch


def seed_everything(*words: int) -> None:
    """Seed torch, numpy and Python's ``random`` with integers, such as seed, rank and epoch.

    >>> seed_everything(7)
    >>> first = torch.rand(3), np.random.rand(), random.random()
    >>> seed_everything(7)
    >>> bool((torch.rand(3) == first[0]).all()), np.random.rand() == first[1], random.random() == first[2]
    (True, True, True)
    """
    seeds = np.random.SeedSequence(words).generate_state(3)
    torch.manual_seed(int(seeds[0]))
    np.random.seed(seeds[1])
    random.seed(int(seeds[2]))


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of torch (CPU and CUDA), numpy and Python."""
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict), "legacy=False returns a dict"
    state = numpy_state["state"]
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        # A plain list: reading a checkpoint must not execute code.
        "numpy": {**numpy_state, "state": {"key": state["key"].tolist(), "pos": int(state["pos"])}},
        "python": random.getstate(),
    }


def load_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore the generators to the states that :func:`random_states` returned."""
    torch.set_rng_state(states["torch"].cpu())
    if states["device"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["device"].cpu(), device)
    state = states["numpy"]["state"]
    np.random.set_state({**states["numpy"], "state": {**state, "key": np.array(state["key"], dtype=np.uint32)}})
    random.setstate(states["python"])


@contextmanager
def algorithms(*, deterministic: bool, tf32: bool = False) -> Iterator[None]:
    """Restrict torch to deterministic algorithms, or let it find the fastest for each size; allow TF32 by choice."""
    was_deterministic, warned_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    was_benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        # cuBLAS reads this at its first use: docs.nvidia.com/cuda/cublas, "Results reproducibility".
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        with _tf32_products() if tf32 else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)
        torch.backends.cudnn.benchmark = was_benchmark


@contextmanager
def _tf32_products() -> Iterator[None]:
    """In the block, CUDA rounds the inputs of float32 matrix products to TF32."""
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # The user has chosen precisions by torch's newer settings, which exclude this one.
        matmul: Any = torch.backends.cuda.matmul
        before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
        try:
            yield
        finally:
            matmul.fp32_precision = before
        return
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
