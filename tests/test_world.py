"""The sources of rank and world size, and the world that a process passes only to its own workers."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from torch.multiprocessing.spawn import start_processes
from torch.utils.data import DataLoader as TorchLoader, Dataset

from shardio import DataLoader, ShardDataset
from shardio.world import CarriedWorld, Worker, World, find_worker, find_world, find_world_size
from tests.raising import assert_raises

ALONE = World(rank=0, world_size=1)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, None, None)


def set_environment(monkeypatch: pytest.MonkeyPatch, rank: str | None, world_size: str | None) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_process_is_rank_0_of_1_unless_torchruns_variables_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_world() == ALONE
    assert find_worker() == Worker(worker_id=0, num_workers=1)
    set_environment(monkeypatch, "3", "7")
    assert find_world() == World(rank=3, world_size=7)


@pytest.mark.usefixtures("group")
def test_a_process_group_overrides_the_variables_and_arguments_override_both(monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size in ("7", None):
        set_environment(monkeypatch, "3", world_size)
        assert (find_world(), find_world_size()) == (ALONE, 1)
        for carried in (None, CarriedWorld.find()):
            assert find_world(1, 2, carried=carried) == World(rank=1, world_size=2)


def test_the_world_size_is_known_without_torch() -> None:
    cases = [(None, None, 1), ("3", "7", 7), ("3", None, 1), (None, "7", 1), ("3", "x", 1), ("7", "7", 1)]
    program = f"""
import os, sys
from shardio.world import find_world_size
for rank, world_size, found in {cases}:
    for name, text in (("RANK", rank), ("WORLD_SIZE", world_size)):
        os.environ.pop(name, None)
        os.environ |= {{}} if text is None else {{name: text}}
    assert find_world_size() == found, (rank, world_size)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("rank", "world_size"), [(1, None), (None, 2), (0, None)])
def test_only_one_of_rank_and_world_size_is_an_error(rank: int | None, world_size: int | None, packed: Path) -> None:
    message = f"both .* or neither; got rank={rank} and world_size={world_size}"
    assert_raises(ValueError, message, find_world, rank, world_size)
    message = "pass both rank and world_size, or neither"
    assert_raises(ValueError, message, ShardDataset, packed, rank=rank, world_size=world_size)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (5, -1)])
def test_a_rank_out_of_range_is_an_error(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, str(rank), str(world_size))
    for arguments in ((rank, world_size), ()):
        assert_raises(ValueError, f"got {rank} of {world_size}", find_world, *arguments)


@pytest.mark.parametrize(
    ("rank", "world_size", "words"),
    [
        ("3", None, "RANK is '3', but WORLD_SIZE is not set"),
        (None, "1", "WORLD_SIZE is '1', but RANK is not set"),
        ("abc", "2", r"\bRANK\b.*'abc'"),
        ("", "2", r"\bRANK\b.*''"),
        ("0", "two", r"\bWORLD_SIZE\b.*'two'"),
        ("0", "2.0", r"\bWORLD_SIZE\b.*'2.0'"),
    ],
)
def test_half_an_environment_and_an_invalid_variable_are_errors_that_name_it(
    rank: str | None, world_size: str | None, words: str, monkeypatch: pytest.MonkeyPatch, packed: Path
) -> None:
    set_environment(monkeypatch, rank, world_size)
    dataset = ShardDataset(packed, fields="key")  # The process may join a group before it needs the world.
    makes: list[Any] = [find_world, lambda: len(TorchLoader(dataset)), lambda: iter(DataLoader(dataset))]
    for read in (*makes, lambda: iter(dataset)):
        assert_raises(ValueError, words, read)
    assert find_world(1, 2) == World(rank=1, world_size=2)


class Worlds(Dataset[tuple[int, int]]):
    """A dataset that carries several worlds; each item is the world that a process finds for one of them."""

    def __init__(self, *carried: CarriedWorld | None) -> None:
        self.carried = carried

    def __len__(self) -> int:
        return len(self.carried)

    def __getitem__(self, index: int) -> tuple[int, int]:
        world = find_world(carried=self.carried[index])
        return world.rank, world.world_size


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_only_own_torch_workers_use_a_carried_world(context: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, "1", "3")
    ours = CarriedWorld.find()
    set_environment(monkeypatch, "4", "5")
    others = replace(ours, process_id=ours.process_id + 1)
    worlds = Worlds(ours, others, None)
    loader = TorchLoader(worlds, batch_size=None, num_workers=1, multiprocessing_context=context)
    assert [tuple(world) for world in loader] == [(1, 3), (4, 5), (4, 5)]
    # The process itself, and a child that is not a torch worker, ignore a carried world, because it may be outdated.
    assert [worlds[index] for index in range(3)] == [(4, 5)] * 3
    if context == "fork":
        with multiprocessing.get_context(context).Pool(1) as pool:
            assert pool.map(worlds.__getitem__, range(3)) == [(4, 5)] * 3
            pool.close()
            pool.join()


def test_a_dataset_finds_the_world_where_and_when_it_needs_it(monkeypatch: pytest.MonkeyPatch, packed: Path) -> None:
    dataset = ShardDataset(packed, fields="key")
    assert len(dataset) == 21
    set_environment(monkeypatch, "1", "3")
    assert (len(dataset), dataset.world()) == (7, World(rank=1, world_size=3))
    copy = pickle.loads(pickle.dumps(dataset))
    set_environment(monkeypatch, "2", "4")
    assert copy.world() == World(rank=2, world_size=4)
    given = pickle.loads(pickle.dumps(ShardDataset(packed, fields="key", rank=5, world_size=6)))
    assert given.world() == World(rank=5, world_size=6)


def load_launched(rank: int, pickled: bytes, folder: str) -> None:
    """On one of two ranks, load an epoch of the launcher's dataset in shardio's and in torch's workers."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    dataset = pickle.loads(pickled)
    loaders: list[Any] = [make(dataset, batch_size=4, num_workers=1) for make in (DataLoader, TorchLoader)]
    keys = [[key for batch in loader for key in batch] for loader in loaders]
    Path(folder, f"{rank}.json").write_text(json.dumps(keys))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_a_launchers_world_is_not_that_of_its_ranks(packed: Path, tmp_path: Path) -> None:
    """The launcher is rank 0 of 1. Ranks that used the launcher's world would deliver everything twice."""
    dataset = ShardDataset(packed, fields="key", shuffle=True, remainder="keep")
    assert dataset.world() == ALONE
    arguments = (pickle.dumps(dataset), str(tmp_path))
    start_processes(load_launched, args=arguments, nprocs=2, daemon=False, start_method="fork")
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    expected = sorted(ShardDataset(packed, fields="key"))
    assert [sorted(one + other) for one, other in zip(first, second, strict=True)] == [expected] * 2
