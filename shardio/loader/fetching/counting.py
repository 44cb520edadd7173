"""Figures for the statistics of loaders that call the user's dataset."""

from __future__ import annotations

import time
from typing import Any

from shardio.loader.fetching.job import FetchJob
from shardio.loader.processes.messages import StageTimes
from shardio.loader.stats import Tally


def count_samples(job: FetchJob, samples: Any) -> int:
    """Return how many samples a fetcher has returned."""
    return len(samples) if job.is_batched and hasattr(samples, "__len__") else 1


def measure_since(began: float, idle_s: float = 0.0) -> StageTimes:
    """Return the times of a batch: since it was begun, all is the user's code.

    Args:
        began: When it was begun, by ``time.perf_counter``.
        idle_s: How long the worker waited before, in seconds.
    """
    python_s = time.perf_counter() - began
    return StageTimes(transform_s=python_s, python_s=python_s, idle_s=idle_s)


def begin_tally(job: FetchJob) -> Tally:
    """Return the counts of an epoch that begins."""
    names = [getattr(each, "__qualname__", type(each).__name__) for each in (job.dataset, job.collate_fn)]
    return Tally(num_workers=job.num_workers, in_python=tuple(names))
