"""Exactly once: random combinations of ranks, workers and batch sizes, and real gloo process groups."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.utils.data import DataLoader as TorchLoader

import shardio
from shardio import DataLoader, ShardDataset
from shardio.check import Coverage, ExpectedSamples, make_report, record
from tests.processes import IMPORTED_BY_WORKERS, forkserver_context, run_ranks
from tests.sources import write_images

LOADERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("ours", DataLoader, {"num_workers": 2}),
    ("ours, forked", DataLoader, {"num_workers": 2, "multiprocessing_context": "fork"}),
    ("ours, by a server", DataLoader, {"num_workers": 2, "multiprocessing_context": "forkserver"}),
    ("torchs, forked", TorchLoader, {"num_workers": 2, "multiprocessing_context": "fork"}),
    ("torchs, by a server", TorchLoader, {"num_workers": 2, "multiprocessing_context": "forkserver"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    write_images(root, classes=2, per_class=31, width=8, height=8)
    return root


@pytest.mark.parametrize("case", range(8))
def test_random_combinations_cover_the_epoch(case: int, folder: Path, tmp_path: Path) -> None:
    rng = random.Random(case)
    world_size, num_workers, batch_size = rng.randint(1, 4), rng.randint(0, 3), rng.randint(1, 17)
    remainder = ("pad", "mask", "keep", "drop")[case % 4]
    shuffle, make_loader = rng.random() < 0.7, (DataLoader, TorchLoader)[rng.random() < 0.3]
    shardio.pack(folder, tmp_path / "out", max_shard_samples=rng.randint(1, 70), shuffle_seed=case)
    expected = list(ShardDataset(tmp_path / "out", fields="key"))
    order: dict[str, Any] = {"lanes": rng.randint(1, 5), "window": rng.randint(1, 30)} if shuffle else {}
    coverage = Coverage()
    for rank in range(world_size):
        dataset = ShardDataset(
            tmp_path / "out",
            fields="key",
            shuffle=shuffle,
            seed=case,
            remainder=remainder,  # type: ignore[arg-type]  # one of the four
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            **order,
        )
        dataset.set_epoch(case % 3)
        loader = make_loader(dataset, batch_size=batch_size, num_workers=num_workers)
        record(loader, coverage, rank=rank, key=_valid if remainder == "mask" else None)
    wanted = ExpectedSamples.of_keys(
        expected,
        num_repeats=-len(expected) % world_size if remainder == "pad" else 0,
        num_missing=len(expected) % (world_size * batch_size) if remainder == "drop" else 0,
    )
    make_report(coverage, wanted).raise_if_wrong()
    assert len(expected) == 62


def _valid(batch: Any) -> list[str]:
    return [key for key, is_valid in zip(*batch, strict=True) if is_valid]


def run_rank(rank: int, world_size: int, packed: str, rendezvous: str, queue: Any) -> None:
    """Create the dataset before the process group, then load an epoch with workers of each kind."""
    dataset = ShardDataset(packed, fields="key", shuffle=True, remainder="keep")
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    if rank == 1:
        forkserver_context(IMPORTED_BY_WORKERS)
    for name, loader_class, options in LOADERS:
        chosen = options
        if rank == 0 and options.get("multiprocessing_context") == "forkserver":
            chosen = {**options, "multiprocessing_context": "fork"}  # One server is enough: it imports torch.
        queue.put((name, rank, [list(batch) for batch in loader_class(dataset, batch_size=4, **chosen)]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_gloo_ranks_share_the_epoch(packed: Path, tmp_path: Path) -> None:
    manager = forkserver_context().Manager()
    queue = manager.Queue()
    run_ranks(run_rank, 2, str(packed), str(tmp_path / "rendezvous"), queue, num_ranks=2)
    delivered: dict[str, list[str]] = {name: [] for name, *_ in LOADERS}
    for _ in range(2 * len(delivered)):
        name, _rank, batches = queue.get()
        delivered[name] += [key for batch in batches for key in batch]
    expected = sorted(ShardDataset(packed, fields="key"))
    assert {name: sorted(keys) for name, keys in delivered.items()} == dict.fromkeys(delivered, expected)
    manager.shutdown()
