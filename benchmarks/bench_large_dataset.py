"""Measure how soon spawned workers deliver batches from a dataset of millions of samples, and how much memory they add.

``python -m benchmarks.bench_large_dataset``. The dataset is a SharedList of paths and labels, or a plain list. The
memory is the workers' private memory, minus that of workers with a small dataset, plus the growth of the machine's
shared memory. No other program should use shared memory during a run. The benchmark needs Linux.
"""

from __future__ import annotations

import pickle
import time
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import torch.utils.data
import typer

import shardio

LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "shardio": shardio.DataLoader}


class Samples(torch.utils.data.Dataset[Any]):
    """A dataset of paths and labels."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def _read_bytes(path: str, *names: str) -> int:
    """Return the sum, in bytes, of the values whose names start with these prefixes in a file in /proc."""
    lines = Path(path).read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(names))


def _measure(loader: Any, num_workers: int) -> tuple[float, int]:
    """Return the time to the first batch, in seconds, and the memory that the workers added, in bytes."""
    before, began = _read_bytes("/proc/meminfo", "Shmem:"), time.perf_counter()
    batches = iter(loader)
    next(batches)
    first_s = time.perf_counter() - began
    for _ in range(3 * num_workers):  # After these batches, all workers have started.
        next(batches)
    private = sum(_read_bytes(f"/proc/{worker.pid}/smaps_rollup", "Private_") for worker in batches._workers)
    return first_s, private + _read_bytes("/proc/meminfo", "Shmem:") - before


def main(
    samples: Annotated[int, typer.Option(min=1)] = 10_000_000,
    workers: Annotated[int, typer.Option(min=1)] = 8,
    loader: Annotated[str, typer.Option(help="torch or shardio.")] = "shardio",
    plain: Annotated[bool, typer.Option(help="Keep the samples in a plain list.")] = False,
    method: Annotated[Literal["spawn", "forkserver", "fork"], typer.Option()] = "spawn",
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Print the time and the memory of each round."""
    warnings.simplefilter("ignore")  # torch warns if there are more workers than processors.
    listed: Any = [(f"/data/images/train/class-{i % 1000:04d}/image-{i:08d}.jpg", i % 1000) for i in range(samples)]
    began = time.perf_counter()
    if not plain:
        listed = shardio.SharedList(listed)
        print(f"packed {samples:,} samples in {time.perf_counter() - began:.1f} s")
    num_bytes = len(pickle.dumps(listed, protocol=5))
    print(f"pickled, they are {num_bytes / 1e6:,.0f} MB")
    for _ in range(rounds):
        options = {"batch_size": 32, "num_workers": workers, "multiprocessing_context": method}
        _, base = _measure(LOADERS[loader](Samples([("path", 0)] * 10_000), **options), workers)
        first_s, added = _measure(LOADERS[loader](Samples(listed), **options), workers)
        added -= base
        print(
            f"first batch of {workers} workers ({method}) after {first_s:.2f} s; {added / 1e6:,.0f} MB added, "
            f"{added / num_bytes:.2f} × the size of the samples"
        )


if __name__ == "__main__":
    typer.run(main)
