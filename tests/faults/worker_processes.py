"""Loaders that tests disturb, and the worker processes that make their batches."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.loader import LoaderStats
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop
from tests import buffers
from tests.buffers import list_processes, wait_until

__all__ = ["wait_until"]

CROP = Compose([RandomResizedCrop(48), RandomHorizontalFlip()])  # The crops are large enough to be passed in buffers.

BATCH_SIZE = 16  # An epoch has six batches, each made by two or more workers.

DEADLINE_S = 60.0  # The time, in seconds, after which a wait fails.

Kind = Literal["shards", "map", "folder"]
KINDS: tuple[Kind, ...] = ("shards", "map", "folder")

Batches = list[list[list[Any]]]

Expected = dict[Kind, list[Batches]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    images: Path
    shards: Path


def make_loader(
    data: Data, kind: Kind = "shards", num_workers: int = 0, *, transform: Any = CROP, **options: Any
) -> DataLoader:
    """Return a loader that shuffles one kind of dataset, in an order that does not depend on the number of workers."""
    timeout = DEADLINE_S if num_workers else 0
    options = {"batch_size": BATCH_SIZE, "num_workers": num_workers, "timeout": timeout, **options}
    fields = ("image", "label", "key")
    if kind == "shards":
        return DataLoader(ShardDataset(data.shards, fields=fields, shuffle=True, transform=transform), **options)
    dataset: Any = ImageFolder(data.images, transform=transform)
    if kind == "map":
        dataset = ShardMapDataset(data.shards, fields=fields, transform=transform)
    return DataLoader(dataset, sampler=EpochSampler(dataset), **options)


def plain(batch: Any) -> list[list[Any]]:
    return [part.tolist() if isinstance(part, torch.Tensor) else list(part) for part in batch]


def batches_of(loader: Any) -> Batches:
    """Return the batches as plain values, converted only after the last batch has arrived, to detect changes."""
    return [plain(batch) for batch in list(loader)]


def collect(loader: Any, batches: Batches, after_first: Callable[[], None] = lambda: None) -> None:
    """Append the batches to a list, which keeps those that precede an error. Call ``after_first`` after the first
    batch."""
    for batch in loader:
        batches.append(plain(batch))
        if len(batches) == 1:
            after_first()


def count_images(stats: LoaderStats) -> int:
    return sum(stats.num_images_by_decoder.values())


def find_worker_processes() -> list[int]:
    return sorted(buffers.find_worker_processes())


def is_alive(process_id: int) -> bool:
    return process_id in [found for found, _, _ in list_processes()]


def send_signal(process_id: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(process_id, number)


def warns_of_deaths() -> Any:
    return pytest.warns(
        RuntimeWarning,
        match=r"(worker \(pid|fork server) \d+.*; (it was|they were) restarted; (its|their) unfinished batches are ",
    )


@contextmanager
def run_during(disturb: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def install_poison(modules: Path, key: str, max_deaths: int, others_s: float = 0.0) -> None:
    """Make up to ``max_deaths`` worker processes abort when they make a chunk that has the sample ``key``.

    Each process creates a file ``death-<n>``. All other chunks take ``others_s`` seconds longer than usual.
    """
    install(
        modules,
        f"""
    if {key!r} in self._reader.keys(chunk.samples):
        for number in range({max_deaths}):
            try:
                os.close(os.open({str(modules)!r} + f"/death-{{number}}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.abort()
    time.sleep({others_s})
""",
    )


@dataclass(frozen=True, slots=True)
class Gate:
    folder: Path

    def count(self, what: Literal["begun", "made"]) -> int:
        return len(list(self.folder.glob(f"{what}-*")))

    def is_made(self, number: int) -> bool:
        return (self.folder / f"made-{number}").exists()

    def open(self) -> None:
        (self.folder / "open").touch()


def install_gate(modules: Path, held: range = range(0)) -> Gate:
    folder = str(modules)
    install(
        modules,
        f"""
    number = chunk.chunk_id
    open({folder!r} + f"/begun-{{number}}", "w").close()
    while number in {held!r} and not os.path.exists({folder!r} + "/open"):
        time.sleep(0.002)
    outcome = make(self, chunk, rows, wait_s)
    open({folder!r} + f"/made-{{number}}", "w").close()
    return outcome
""",
    )
    return Gate(modules)


def install(modules: Path, what: str, beforehand: str = "") -> None:
    """Use sitecustomize, which Python imports at startup, to make worker processes run code before each chunk."""
    (modules / "sitecustomize.py").write_text(
        f"""
import itertools, os, threading, time
from shardio.loader.chunk_worker import ChunkBuilder

make, numbers = ChunkBuilder.make, itertools.count()
{beforehand}

def make_after_all(self, chunk, rows, wait_s=0.0):
{what}
    return make(self, chunk, rows, wait_s)

ChunkBuilder.make = make_after_all
"""
    )
