"""Measure how long it takes to open an epoch, and to jump to any position in it.

``python -m benchmarks.bench_order``: 10^9 samples in 10^5 shards, 4,096 ranks. The benchmark times the first 1,000
positions of a rank after opening the epoch and after jumping to a random cursor, and then measures the cost per
position in long runs.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from shardio.order import EpochOrder, Split, choose_settings

WORLD_SIZE = 4096
BATCH_SIZE = 250
ROUNDS = 15


def open_and_read(num_shards: int, shard_samples: int, epoch: int, start: int) -> None:
    """Open an epoch and compute 1,000 positions of one rank, beginning at ``start``."""
    sizes = np.full(num_shards, shard_samples)
    settings = choose_settings(sizes, shuffle=True, seed=0)
    order = EpochOrder(sizes, settings, epoch)
    split = Split(
        num_samples=order.num_samples,
        start=start,
        rank=epoch % WORLD_SIZE,
        world_size=WORLD_SIZE,
        batch_size=BATCH_SIZE,
        strata=settings.strata,
        remainder="pad",
    )
    order.samples_at(np.concatenate([split.batch(step) for step in range(1000 // BATCH_SIZE)]))


def measure(work: Callable[[int], None]) -> str:
    """Return the time of several rounds of ``work(round)``, and the peak memory of one more round."""
    times = []
    for number in range(ROUNDS):
        start = time.perf_counter()
        work(number)
        times.append(1000 * (time.perf_counter() - start))
    tracemalloc.start()
    work(ROUNDS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return f"{statistics.median(times):7.1f} ms ({min(times):.1f} to {max(times):.1f}), {peak / 1e6:6.1f} MB"


def main() -> None:
    """Print the results."""
    random = np.random.default_rng(0)
    cursors = random.integers(0, 10**9 - 10**7, ROUNDS + 1).tolist()
    print(f"median of {ROUNDS} rounds (minimum to maximum), peak memory")
    print("10^9 samples in 10^5 shards, from the start ", measure(lambda i: open_and_read(10**5, 10**4, i, 0)))
    print("10^9 samples in 10^5 shards, from any cursor", measure(lambda i: open_and_read(10**5, 10**4, i, cursors[i])))
    print("10^11 samples in 10^6 shards, from the start", measure(lambda i: open_and_read(10**6, 10**5, i, 0)))
    sizes = np.full(1000, 1000)
    order = EpochOrder(sizes, choose_settings(sizes, shuffle=True, seed=0), 0)
    positions = np.arange(10**5)
    print("100,000 positions of 10^6 samples           ", measure(lambda _: (order.samples_at(positions), None)[1]))


if __name__ == "__main__":
    main()
