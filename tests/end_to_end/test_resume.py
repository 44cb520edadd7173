"""Resuming in the middle of an epoch with a process group of another size: every sample comes exactly once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed
from torch.utils.data import DataLoader as TorchLoader

import shardio
from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from tests.processes import IMPORTED_BY_WORKERS, forkserver_context, run_ranks
from tests.sources import write_images

SEED = 5
NUM_SAMPLES = 62

Policy = Literal["keep", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group, and the loader options of its ranks."""

    world_size: int
    batch_size: int
    num_workers: int
    context: str | None = None
    persistent_workers: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The arguments for a loader."""
        return {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "multiprocessing_context": self.context,
            "persistent_workers": self.persistent_workers,
        }


def load_shards(packed: str, remainder: Policy, group: Group) -> DataLoader:
    dataset = ShardDataset(packed, fields="key", shuffle=True, seed=SEED, remainder=remainder, lanes=3, window=9)
    return DataLoader(dataset, **group.options)


def load_by_index(packed: str, remainder: Policy, group: Group) -> DataLoader:
    dataset = ShardMapDataset(packed, fields="key")
    sampler = EpochSampler(dataset, seed=SEED, remainder=remainder, lanes=3, window=9)
    return DataLoader(dataset, sampler=sampler, **group.options)


KINDS: dict[str, tuple[Callable[[str, Policy, Group], DataLoader], Policy]] = {
    "shards keep": (load_shards, "keep"),
    "shards mask": (load_shards, "mask"),
    "by index keep": (load_by_index, "keep"),
    "by index mask": (load_by_index, "mask"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the ranks of one group do.

    Attributes:
        packed: The dataset.
        group: The group.
        kinds: The names of the loaders in KINDS.
        states: The state from which each loader resumes; empty to start an epoch.
        num_batches: The number of batches after which each rank stops; None for the rest of the epoch.
        num_epochs: The number of further epochs after that.
        with_torch: Whether torch's own DataLoader loads the epoch, too.
        folder: Where the ranks meet and write their results.
    """

    packed: str
    group: Group
    kinds: tuple[str, ...]
    states: dict[str, Any]
    num_batches: int | None
    num_epochs: int
    with_torch: bool
    folder: str


def run_rank(rank: int, task: Task) -> None:
    """Create all loaders, then the process group, then load."""
    assert "RANK" not in os.environ
    assert "WORLD_SIZE" not in os.environ
    group = task.group
    if group.context == "forkserver":
        forkserver_context(IMPORTED_BY_WORKERS)
    loaders = {kind: KINDS[kind][0](task.packed, KINDS[kind][1], group) for kind in task.kinds}
    for_torch = ShardDataset(
        task.packed, fields="key", shuffle=True, seed=SEED, remainder="keep", batch_size=group.batch_size
    )
    torchs = TorchLoader(for_torch, **group.options)
    for kind, loader in loaders.items():
        assert len(loader) == -(
            -NUM_SAMPLES // group.batch_size
        )  # The length of one rank alone, which the loader must not keep.
        if task.states:
            loader.load_state_dict(task.states[kind])

    rendezvous = f"file://{task.folder}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=group.world_size)
    results: dict[str, Any] = {"lengths": {}, "epochs": {}, "states": {}, "torchs": []}
    for kind, loader in loaders.items():
        results["lengths"][kind] = len(loader)
        epochs = [plain(islice(loader, task.num_batches))]
        results["states"][kind] = loader.state_dict()
        epochs += [plain(loader) for _ in range(task.num_epochs)]
        results["epochs"][kind] = epochs
    if task.with_torch:
        results["torchs"] = plain(torchs)
    Path(task.folder, f"{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def plain(batches: Iterable[Any]) -> list[Any]:
    """Return batches as lists: of keys, or pairs of keys and marks if batches have marks."""
    return [[list(batch[0]), batch[1].tolist()] if torch.is_tensor(batch[-1]) else list(batch) for batch in batches]


def valid_keys(kind: str, batches: list[Any]) -> list[str]:
    """Return the keys in batches, without repeats that are marked as invalid."""
    if KINDS[kind][1] == "keep":
        return [key for batch in batches for key in batch]
    return [key for keys, marks in batches for key, is_valid in zip(keys, marks, strict=True) if is_valid]


def launch(task: Task) -> list[dict[str, Any]]:
    """Run a group; return the results of each rank."""
    Path(task.folder).mkdir()
    run_ranks(run_rank, task, num_ranks=task.group.world_size)
    return [json.loads(Path(task.folder, f"{rank}.json").read_text()) for rank in range(task.group.world_size)]


@pytest.fixture(scope="module")
def packed_62(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """62 samples in shards of at most 7."""
    root = tmp_path_factory.mktemp("packed_62")
    write_images(root / "source", classes=2, per_class=31, width=8, height=8)
    shardio.pack(root / "source", root / "out", max_shard_samples=7)
    return root / "out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCase:
    """The group that stops after some batches, and the group that resumes."""

    old: Group
    num_batches: int
    new: Group
    kinds: tuple[str, ...]
    num_epochs: int = 0


CASES = {
    "fork, then persistent workers": ResumeCase(
        old=Group(world_size=3, batch_size=3, num_workers=2, context="fork"),
        num_batches=3,
        new=Group(world_size=2, batch_size=4, num_workers=1, context="fork", persistent_workers=True),
        kinds=("shards keep", "by index mask"),
        num_epochs=2,
    ),
    "forkserver, then no workers": ResumeCase(
        old=Group(world_size=2, batch_size=3, num_workers=1, context="forkserver"),
        num_batches=7,
        new=Group(world_size=3, batch_size=5, num_workers=0),
        kinds=("shards mask", "by index keep"),
        num_epochs=1,
    ),
    "no workers, then fork": ResumeCase(
        old=Group(world_size=1, batch_size=9, num_workers=0),
        num_batches=2,
        new=Group(world_size=2, batch_size=3, num_workers=2, context="fork"),
        kinds=("shards mask", "by index keep"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_another_group_resumes_and_every_sample_comes_once(
    name: str, packed_62: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    case = CASES[name]
    old = launch(
        Task(
            packed=str(packed_62),
            group=case.old,
            kinds=case.kinds,
            states={},
            num_batches=case.num_batches,
            num_epochs=0,
            with_torch=True,
            folder=str(tmp_path / "old"),
        )
    )
    assert all(rank["states"] == old[0]["states"] for rank in old)
    position = case.num_batches * case.old.world_size * case.old.batch_size
    assert {state["position"] for state in old[0]["states"].values()} == {position}

    new = launch(
        Task(
            packed=str(packed_62),
            group=case.new,
            kinds=case.kinds,
            states=old[0]["states"],
            num_batches=None,
            num_epochs=case.num_epochs,
            with_torch=False,
            folder=str(tmp_path / "new"),
        )
    )
    expected = sorted(ShardDataset(packed_62, fields="key"))
    assert len(expected) == NUM_SAMPLES
    for kind in case.kinds:
        before = [key for rank in old for key in valid_keys(kind, rank["epochs"][kind][0])]
        after = [key for rank in new for key in valid_keys(kind, rank["epochs"][kind][0])]
        assert len(before) == position, kind
        assert sorted(before + after) == expected, kind
        for epoch in range(1, case.num_epochs + 1):
            whole = [valid_keys(kind, rank["epochs"][kind][epoch]) for rank in new]
            assert sorted(key for keys in whole for key in keys) == expected, kind
            assert whole == epoch_of_ranks(packed_62, kind, case.new, epoch), kind
            # The length is that of a full epoch, although a state was loaded before.
            assert all(len(rank["epochs"][kind][epoch]) == rank["lengths"][kind] for rank in new), kind

    torchs = [rank["torchs"] for rank in old]
    assert torchs == batches_of_ranks(packed_62, case.old)


def batches_of_ranks(packed: Path, group: Group) -> list[list[Any]]:
    """Return the batches of each rank from our loader, in this process alone."""
    return [
        plain(
            DataLoader(
                ShardDataset(
                    packed,
                    fields="key",
                    shuffle=True,
                    seed=SEED,
                    remainder="keep",
                    rank=rank,
                    world_size=group.world_size,
                ),
                batch_size=group.batch_size,
            )
        )
        for rank in range(group.world_size)
    ]


def epoch_of_ranks(packed: Path, kind: str, group: Group, epoch: int) -> list[list[str]]:
    """Return the keys of each rank in an epoch, in this process alone.

    Both kinds of dataset have the same shards, so they have the same order.
    """
    of_ranks = []
    for rank in range(group.world_size):
        dataset = ShardDataset(
            packed,
            fields="key",
            shuffle=True,
            seed=SEED,
            remainder=KINDS[kind][1],
            lanes=3,
            window=9,
            rank=rank,
            world_size=group.world_size,
        )
        dataset.set_epoch(epoch)
        of_ranks.append(valid_keys(kind, plain(DataLoader(dataset, batch_size=group.batch_size))))
    return of_ranks
