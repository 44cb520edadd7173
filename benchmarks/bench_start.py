"""Measure the CPU time that worker processes take to start: ``python -m benchmarks.bench_start IMAGES PACKED``.

The CPU time is that of a new program's fork server and worker processes until they are ready, before they make any
batch. The benchmark alternates between a directory and its packed copy, each with one and with two worker processes.
The first line shows the CPU time of a bare ``import numpy``. The benchmark needs Linux.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.timing import summarize
from shardio import DataLoader, ImageFolder, ShardDataset
from shardio.transforms import RandomResizedCrop

READY_S = 1.0
"""The seconds that worker processes are given to become ready. Until they get work, ready processes use no CPU time."""


def cpu_ms(process_id: int) -> float:
    """Return the CPU time of a process's threads in milliseconds."""
    threads = Path(f"/proc/{process_id}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e6


def start(source: str, num_workers: int) -> float:
    """Start worker processes in this program, and return their CPU time plus that of their fork server, in ms."""
    dataset = (ShardDataset if (Path(source) / "shardio.json").exists() else ImageFolder)(
        source, transform=RandomResizedCrop(224)
    )
    loader = DataLoader(dataset, batch_size=8, num_workers=num_workers)
    loader.start_workers()
    time.sleep(READY_S)  # Worker processes do not report when they are ready.
    psutil: Any = importlib.import_module("psutil")
    return sum(cpu_ms(each.pid) for each in psutil.Process().children(recursive=True))


def start_in_new_program(source: str, num_workers: int) -> float:
    """Return the result of calling :func:`start` in a new Python process."""
    code = f"from benchmarks.bench_start import start; print(start({source!r}, {num_workers}))"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def import_numpy() -> float:
    """Return the CPU time of a process that imports numpy as a fork server does."""
    process = subprocess.Popen([sys.executable, "-c", "import numpy"], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    usage = os.wait4(process.pid, 0)[2]
    process.returncode = 0
    return (usage.ru_utime + usage.ru_stime) * 1000


def main(
    images: Annotated[Path, typer.Argument(help="Class folders of JPEGs.")],
    packed: Annotated[Path, typer.Argument(help="The same images, packed.")],
    rounds: Annotated[int, typer.Option(min=1)] = 11,
) -> None:
    """Print the CPU times."""
    cases = [(str(source.resolve()), num_workers) for source in (images, packed) for num_workers in (1, 2)]
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        times.setdefault("import numpy", []).append(import_numpy())
        for source, num_workers in cases:
            name = f"{Path(source).name}, {num_workers} worker processes"
            times.setdefault(name, []).append(start_in_new_program(source, num_workers))
    for name, found in times.items():
        print(f"{name}: {summarize(found, 0)} ms of CPU time")


if __name__ == "__main__":
    typer.run(main)
