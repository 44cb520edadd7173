"""Samples arrive exactly once with any combination of ranks, workers, batch sizes and resumptions, and in real gloo
groups."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.utils.data import DataLoader as TorchLoader

import shardio
from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.check import Coverage, ExpectedSamples, make_report, record
from tests.processes import IMPORTED_BY_WORKERS, forkserver_context, run_ranks
from tests.sources import write_images

FORK, SERVER = ({"num_workers": 1, "multiprocessing_context": context} for context in ("fork", "forkserver"))
LOADERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("ours", DataLoader, {"num_workers": 2}),
    ("ours, forked", DataLoader, FORK),
    ("ours, by a server", DataLoader, SERVER),
    ("torchs, forked", TorchLoader, FORK),
    ("torchs, by a server", TorchLoader, SERVER),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    write_images(root, classes=2, per_class=31, width=8, height=8)
    return root


@pytest.mark.parametrize("max_workers", [0, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", range(8))
def test_random_combinations_cover_the_epoch(case: int, max_workers: int, folder: Path, tmp_path: Path) -> None:
    rng = random.Random(case)
    world_size, num_workers, batch_size = rng.randint(1, 4), rng.randint(0, 3) % (max_workers + 1), rng.randint(1, 17)
    remainder = ("pad", "mask", "keep", "drop")[case % 4]
    shuffle, make_loader = rng.random() < 0.7, (DataLoader, TorchLoader)[rng.random() < 0.3]
    shardio.pack(folder, tmp_path / "out", max_shard_samples=rng.randint(1, 70), shuffle_seed=case)
    expected = list(ShardDataset(tmp_path / "out", fields="key"))
    order: dict[str, Any] = {"window": rng.randint(1, 80), "strata": rng.choice((1, 4, 16))} if shuffle else {}
    order |= {"shuffle": shuffle, "seed": case, "remainder": remainder, "batch_size": batch_size}
    coverage = Coverage()
    for rank in range(world_size):
        dataset = ShardDataset(tmp_path / "out", fields="key", rank=rank, world_size=world_size, **order)
        dataset.set_epoch(case % 3)
        loader = make_loader(dataset, batch_size=batch_size, num_workers=num_workers)
        record(loader, coverage, rank=rank, key=_valid if remainder == "mask" else None)
    wanted = ExpectedSamples.of_keys(
        expected,
        num_repeats=-len(expected) % world_size if remainder == "pad" else 0,
        num_missing=len(expected) % (world_size * batch_size) if remainder == "drop" else 0,
    )
    make_report(coverage, wanted).raise_if_wrong()


def _valid(batch: Any) -> list[str]:
    return [key for key, is_valid in zip(*batch, strict=True) if is_valid]


@pytest.mark.parametrize("kind", ["shards", "by index"])
def test_a_group_of_another_size_resumes(kind: str, folder: Path, tmp_path: Path) -> None:
    shardio.pack(folder, tmp_path / "out", max_shard_samples=7)
    whole = sorted(ShardDataset(tmp_path / "out", fields="key"))

    def make(rank: int, world_size: int, batch_size: int) -> DataLoader:
        options: dict[str, Any] = {"rank": rank, "world_size": world_size, "remainder": remainder}
        options |= {"seed": 5, "window": 24, "strata": 8}
        if kind == "shards":
            return DataLoader(ShardDataset(tmp_path / "out", fields="key", shuffle=True, **options), batch_size)
        dataset = ShardMapDataset(tmp_path / "out", fields="key")
        return DataLoader(dataset, batch_size, sampler=EpochSampler(dataset, **options))

    def keys_of(batches: Any) -> list[str]:
        return [key for batch in batches for key in (_valid(batch) if remainder == "mask" else batch)]

    for case in range(4):
        rng = random.Random(case)
        old, new = rng.randint(1, 4), rng.randint(1, 4)
        batch_size, new_size, remainder = rng.randint(1, 9), rng.randint(1, 9), ("keep", "mask")[case % 2]
        num_batches = rng.randint(1, 62 // (old * batch_size))
        loaders = [make(rank, old, batch_size) for rank in range(old)]
        delivered = [key for loader in loaders for key in keys_of(islice(loader, num_batches))]
        states = [loader.state_dict() for loader in loaders]
        assert states == [states[0]] * old
        assert states[0]["position"] == len(delivered) == num_batches * old * batch_size
        for rank in range(new):
            loader, oracle = (make(rank, new, new_size) for _ in range(2))
            loader.load_state_dict(states[0])
            oracle.set_epoch(1)
            delivered += keys_of(loader)
            assert keys_of(loader) == keys_of(oracle), "the next epoch is whole"
        assert sorted(delivered) == whole, case


def run_rank(
    rank: int, world_size: int, packed: str, states: Any, num_batches: int | None, place: str, queue: Any
) -> None:
    """Create the loaders before the process group, then load with workers of each kind."""
    dataset = ShardDataset(packed, fields="key", shuffle=True, remainder="keep")
    loaders = {}
    if rank == 1:
        forkserver_context(IMPORTED_BY_WORKERS)
    for name, loader_class, options in LOADERS:
        # Start only one fork server, because each imports torch.
        loaders[name] = loader_class(dataset, batch_size=2, **(FORK if rank == 0 and options == SERVER else options))
        if name in states:
            loaders[name].load_state_dict(states[name])
    assert len(loaders["ours"]) == 11, "without a group, the length is that of one rank"
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world_size)
    lengths = {-(-number // 2) for number in (21 // world_size, -(-21 // world_size))}
    for name, loader in loaders.items():
        if name.startswith("ours"):
            assert len(loader) in lengths, "the length is that of a full epoch, even after a state was loaded"
            keys = [key for batch in islice(loader, num_batches) for key in batch]
            queue.put((name, keys, loader.state_dict()))
        elif num_batches is None:
            queue.put((name, [key for batch in loader for key in batch], None))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_gloo_ranks_share_the_epoch_and_another_group_resumes_it(packed: Path, tmp_path: Path) -> None:
    manager = forkserver_context().Manager()
    queue = manager.Queue()
    delivered: dict[str, list[str]] = {name: [] for name, *_ in LOADERS}
    states: dict[str, Any] = {}
    for world_size, num_batches, num_loaders in ((2, 3, 3), (3, None, len(LOADERS))):
        place = str(tmp_path / str(world_size))
        run_ranks(run_rank, world_size, str(packed), states, num_batches, place, queue, num_ranks=world_size)
        for _ in range(world_size * num_loaders):
            name, keys, state = queue.get()
            delivered[name] += keys
            assert num_batches is None or states.setdefault(name, state) == state
    expected = sorted(ShardDataset(packed, fields="key"))
    assert {name: sorted(keys) for name, keys in delivered.items()} == dict.fromkeys(delivered, expected)
    assert {state["position"] for state in states.values()} == {2 * 3 * 2}
    manager.shutdown()
