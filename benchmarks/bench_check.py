"""Measure what checking costs: ``python -m benchmarks.bench_check``.

The benchmark measures the memory and time needed to judge 10^8 deliveries of integer keys, and the time that
CoverageRecorder adds per image in batches of 256 string keys.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import time

import numpy as np

from shardio.check import Coverage, CoverageRecorder, Delivery, ExpectedSamples, make_report

NUM_KEYS = 10**8
BATCH_SIZE = 10_000
ROUNDS = 7


def judge_many() -> None:
    """Print the time and memory needed to judge 10^8 deliveries in random order, including two repeats."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    coverage = Coverage()
    step = 99_999_989  # A prime: its multiples, modulo 10^8, visit all numbers below 10^8 in scattered order.
    for batch in range(NUM_KEYS // BATCH_SIZE):
        numbers = np.arange(batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE, dtype=np.uint64)
        scattered = numbers * np.uint64(step) % np.uint64(NUM_KEYS)
        coverage.add_ids(scattered, Delivery(rank=0, worker=batch % 8, batch=batch))
    coverage.add_ids(np.array([5, 6], dtype=np.uint64), Delivery(rank=0, worker=0, batch=batch + 1))
    added = time.perf_counter()
    report = make_report(coverage, ExpectedSamples(num_samples=NUM_KEYS))
    judged = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(str(report).splitlines()[0])
    memory = (peak - before) / 2**20
    print(f"added in {added - start:.0f} s, judged in {judged - added:.0f} s, peak memory {memory:.2f} GiB")


def time_recorder() -> None:
    """Print the CPU time that a recorder adds per image."""
    batches = [
        [f"n{i // 100:05d}/image_{i:07d}" for i in range(start, start + 256)] for start in range(0, 128_000, 256)
    ]
    num_images = 256 * len(batches)
    costs = []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(ROUNDS):
            start = time.process_time()
            for _ in batches:
                pass
            bare = time.process_time() - start
            recorder = CoverageRecorder(directory, rank=0)
            start = time.process_time()
            for _ in recorder.watch(batches):
                pass
            costs.append(1e6 * (time.process_time() - start - bare) / num_images)
    median = statistics.median(costs)
    print(
        f"the recorder adds {median:.2f} µs of CPU time per image ({min(costs):.2f} to {max(costs):.2f}), including "
        f"writing its file: {median / 100:.2%} of the time per image at 10,000 images/s"
    )


if __name__ == "__main__":
    time_recorder()
    judge_many()
