"""The measurement of each case: a function that runs in the process of one candidate."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from benchmarks.loaders.checks import BytesCheck, Figures, ImageCheck, count_samples
from benchmarks.loaders.data import small_samples
from benchmarks.loaders.files import list_files
from benchmarks.loaders.job import Epochs, Job
from benchmarks.loaders.measure import PeakMemory, Stopwatch, measure_pss
from benchmarks.loaders.registry import Candidate

MEGABYTE = 1e6
LOOP = 200_000
"""The number of iterations of the counting loop between two batches: a few milliseconds of plain Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a candidate."""

    candidate: Candidate
    job: Job
    work: Path
    num_epochs: int

    def make(self) -> Epochs:
        """Create the candidate's loader."""
        return self.candidate.make(self.job)


def measure_throughput(trial: Trial) -> Figures:
    """Check the batches of a warm-up epoch, then time whole epochs, each from the end of the previous one.

    Memory is sampled in the warm-up epoch and after the last epoch.
    """
    labels = [label for _, label in list_files(trial.work / "folder")]
    check = ImageCheck(labels, trial.job.batch_size)
    return _measure_epochs(trial, check)


def measure_small(trial: Trial) -> Figures:
    """Measure throughput as in :func:`measure_throughput`, with batches that are lists of bytes objects."""
    job = replace(trial.job, batch_size=512)
    check = BytesCheck(small_samples(job.num_samples))
    return _measure_epochs(replace(trial, job=job), check)


def measure_first_batch(trial: Trial) -> Figures:
    """Measure the time to the first batch of a new loader, and of a second epoch with persistent workers."""
    fresh = replace(trial, job=replace(trial.job, is_persistent=False)).make()
    cold = _time_first(fresh)
    loader = trial.make()
    for _ in loader:
        pass
    return {"cold_ms": 1e3 * cold, "second_epoch_ms": 1e3 * _time_first(loader)}


def measure_epochs(trial: Trial) -> Figures:
    """Measure the CPU time of each of the first three epochs of a new loader."""
    loader = trial.make()
    figures = {}
    for epoch in range(1, 4):
        watch = Stopwatch()
        num_samples = sum(map(count_samples, loader))
        figures[f"epoch_{epoch}_us"] = 1e6 * watch.stop().cpu_s / num_samples
    return figures


def measure_training_process(trial: Trial) -> Figures:
    """Measure the cost of a loader to the training process: CPU time, and the speed of other Python code.

    There is one worker, so on two cores the main thread has a core to itself: if its loop slows down, other threads of
    its process are the cause. ``process_time`` covers all threads of this process, and no other process.
    """
    loader = replace(trial, job=replace(trial.job, num_workers=1)).make()
    for _ in loader:
        pass
    start, num_samples = time.process_time(), 0
    for batch in loader:
        num_samples += count_samples(batch)
    cpu_s = time.process_time() - start
    alone = sorted(_time_loop() for _ in range(50))[25]
    beside = []
    for _ in loader:
        beside += [_time_loop() for _ in range(4)]
    return {
        "training_process_us": 1e6 * cpu_s / num_samples,
        "python_pace": alone * len(beside) / sum(beside),
    }


def measure_memory(trial: Trial) -> Figures:
    """Measure the peak memory that a loader with 8 workers and batches of 256 adds in two epochs."""
    root = os.getpid()
    loader = replace(trial, job=replace(trial.job, num_workers=8, batch_size=256)).make()
    before = measure_pss(root)
    with PeakMemory(root) as memory:
        for _ in range(2):
            for _ in loader:
                pass
    return {"added_mb": (memory.peak - before) / MEGABYTE}


def measure_flatness(trial: Trial) -> Figures:
    """Measure the memory of a small dataset's loader after 2 and after 50 epochs."""
    root = os.getpid()
    loader = replace(trial, job=replace(trial.job, data=trial.work / "tiny")).make()
    figures = {}
    for epoch in range(1, 51):
        for _ in loader:
            pass
        if epoch in (2, 50):
            figures[f"epoch_{epoch}_mb"] = measure_pss(root) / MEGABYTE
    return figures


CASES: dict[str, Callable[[Trial], Figures]] = {
    "train": measure_throughput,
    "eval": measure_throughput,
    "small": measure_small,
    "first-batch": measure_first_batch,
    "epochs": measure_epochs,
    "training-process": measure_training_process,
    "memory": measure_memory,
    "flatness": measure_flatness,
}
"""The measurement of each case, by name."""


def _measure_epochs(trial: Trial, check: ImageCheck | BytesCheck) -> Figures:
    root = os.getpid()
    loader = trial.make()
    with PeakMemory(root) as memory:
        for batch in loader:
            check.add(batch)
    figures = check.finish()
    del check, batch
    watch, num_samples = Stopwatch(), 0
    for _ in range(trial.num_epochs):
        for batch in loader:
            num_samples += count_samples(batch)
    times = watch.stop()
    memory.sample()
    expected = trial.num_epochs * trial.job.num_samples
    if num_samples != expected:
        raise RuntimeError(f"expected {expected} samples in the timed epochs, got {num_samples}")
    return {
        **figures,
        "samples_per_s": num_samples / times.wall_s,
        "cpu_us": 1e6 * times.cpu_s / num_samples,
        "others_cores": max(0.0, times.machine_cpu_s - times.cpu_s) / times.wall_s,
        "peak_mb": memory.peak / MEGABYTE,
    }


def _time_first(loader: Epochs) -> float:
    start = time.perf_counter()
    batches = iter(loader)
    for _ in islice(batches, 1):
        seconds = time.perf_counter() - start
    del batches  # Deleting the iterator ends the workers, unless they are persistent.
    return seconds


def _time_loop() -> float:
    start = time.perf_counter()
    number = LOOP
    while number:
        number -= 1
    return time.perf_counter() - start
