"""Compare the cost of batches of any dataset in torch's DataLoader and in shardio's.

``python -m benchmarks.bench_any_dataset``. The datasets return precomputed values, so only collation and
the transfer from the workers take time. Both loaders have persistent workers, and alternate, epoch by epoch, after a
warm-up epoch. The two loaders' first batches are compared. The benchmark needs Linux.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch.utils.data
import typer

import shardio
from benchmarks.timing import ratios, summarize

LOADERS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "shardio": shardio.DataLoader}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kind of sample, and how many samples to deliver.

    Attributes:
        make: A function that returns the sample at an index.
        batch_size: The number of samples in a batch.
        num_batches: The number of batches in an epoch.
        collate_fn: A function that makes a batch; None for torch's default.
    """

    make: Callable[[int], Any]
    batch_size: int = 256
    num_batches: int = 40
    collate_fn: Any = None


class Ready(torch.utils.data.Dataset[Any]):
    """A dataset of precomputed samples."""

    def __init__(self, case: Case) -> None:
        self.samples = [case.make(number) for number in range(64)]
        self.size = case.batch_size * case.num_batches

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % 64]


def stack_arrays(samples: list[Any]) -> Any:
    """Collate as user code often does."""
    return {"image": torch.from_numpy(np.stack(samples)), "number": len(samples)}


CASES = {
    "uint8 arrays 224×224×3": Case(make=lambda i: np.full((224, 224, 3), i, np.uint8)),
    "uint8 tensors 3×224×224": Case(make=lambda i: torch.full((3, 224, 224), i, dtype=torch.uint8)),
    "uint8 arrays, a user's collate_fn": Case(
        make=lambda i: np.full((224, 224, 3), i, np.uint8), collate_fn=stack_arrays
    ),
    "float32 arrays of 100,000": Case(make=lambda i: np.full(100_000, i, np.float32), batch_size=32),
    "dicts of 3 integers": Case(make=lambda i: {"a": i, "b": i + 1, "c": i + 2}, num_batches=400),
    "strings": Case(make=lambda i: f"sample number {i}", num_batches=3000),
    "lists of 8 floats": Case(make=lambda i: [i / 3] * 8, num_batches=200),
    "ragged lists, as they are": Case(make=lambda i: list(range(i % 32)), num_batches=2000, collate_fn=list),
    "arrays of 10 floats, with labels": Case(make=lambda i: (np.full(10, i / 3), i), num_batches=400),
}


class Candidate:
    """A loader, and the cost of its epochs."""

    def __init__(self, kind: str, case: Case, num_workers: int, method: str) -> None:
        options = {"worker_method": method} if kind == "shardio" else {}
        self.loader = LOADERS[kind](
            Ready(case),
            case.batch_size,
            num_workers=num_workers,
            collate_fn=case.collate_fn,
            persistent_workers=True,
            **options,
        )
        self.wall_ms, self.cpu_ms = list[float](), list[float]()

    def run(self) -> None:
        """Run an epoch, and record its wall time and the CPU time of all processes, both per batch."""
        began, cpu = time.perf_counter(), self._cpu_s()
        for _ in self.loader:
            pass
        self.wall_ms.append(1000 * (time.perf_counter() - began) / len(self.loader))
        self.cpu_ms.append(1000 * (self._cpu_s() - cpu) / len(self.loader))

    def first(self) -> Any:
        """Start the workers and return the first batch."""
        return next(iter(self.loader))

    def _cpu_s(self) -> float:
        psutil: Any = importlib.import_module("psutil")
        workers = [psutil.Process(each.pid) for each in _workers_of(self.loader) if hasattr(each, "pid")]
        return time.process_time() + sum(sum(worker.cpu_times()[:2]) for worker in workers)


def _workers_of(loader: Any) -> list[Any]:
    return list(getattr(loader._iterator, "_workers", ()))


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    workers: Annotated[list[int], typer.Option(help="Numbers of workers.")] = [2, 4],  # noqa: B006  # as typer wants it
    method: Annotated[str, typer.Option(help="shardio's workers: multiprocessing or thread.")] = "multiprocessing",
    only: Annotated[str, typer.Option(help="Measure only the cases whose names contain this text.")] = "",
) -> None:
    """Print a table."""
    warnings.simplefilter("ignore")  # torch warns if there are more workers than processors.
    print("| samples | workers | torch, ms per batch | shardio | times as fast | CPU time, torch / shardio |")
    print("|---|---|---|---|---|---|")
    for name, case in CASES.items():
        for num_workers in workers if only in name else ():
            candidates = {kind: Candidate(kind, case, num_workers, method) for kind in LOADERS}
            torchs, ours = (candidate.first() for candidate in candidates.values())
            assert str(torchs) == str(ours), "the loaders must do equal work"
            for number in range(rounds + 1):
                for candidate in list(candidates.values())[:: 1 if number % 2 else -1]:
                    candidate.run()
            for candidate in candidates.values():
                del candidate.wall_ms[0], candidate.cpu_ms[0]
            reference, shardios = candidates["torch"], candidates["shardio"]
            print(
                f"| {name} | {num_workers} | {summarize(reference.wall_ms, 2)} | {summarize(shardios.wall_ms, 2)} "
                f"| {summarize(ratios(reference.wall_ms, shardios.wall_ms), 2)} "
                f"| {summarize(ratios(reference.cpu_ms, shardios.cpu_ms), 2)} |",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
