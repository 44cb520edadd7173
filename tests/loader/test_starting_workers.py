"""``start_workers``: worker processes that start before their epoch are those that make it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from torch import nn

import shardio
from shardio import DataLoader, EpochSampler, ShardMapDataset
from shardio.train import Callback, TrainConfig, train
from tests.slots import (
    assert_same,
    find_fork_servers,
    find_worker_processes,
    make_loader,
    make_oracle,
    wait_until,
)


def await_workers(num_workers: int) -> set[int]:
    wait_until(lambda: len(find_worker_processes()) == num_workers)
    return find_worker_processes()


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_that_were_started_make_the_next_epoch(pictures: Path, persistent: bool) -> None:
    loader = make_loader(pictures, num_workers=2, persistent_workers=persistent)
    before = find_worker_processes()
    loader.start_workers()
    loader.start_workers()
    started = await_workers(len(before) + 2) - before
    iterator = iter(loader)
    got = list(islice(iterator, 1))
    assert find_worker_processes() - before == started
    got += iterator
    oracle = make_oracle(pictures)
    assert_same(got, list(oracle))
    assert find_worker_processes() - before == (started if persistent else set())
    assert_same(list(loader), list(oracle))


def test_an_epoch_in_progress_keeps_its_worker_processes(pictures: Path) -> None:
    loader, oracle = make_loader(pictures), make_oracle(pictures)
    epochs = [list(oracle), list(oracle)]
    iterator = iter(loader)
    got = [next(iterator)]
    loader.start_workers()
    other = iter(loader)
    assert_same([*got, *iterator], epochs[0])
    assert_same(list(other), epochs[1])


def test_worker_processes_that_were_started_in_vain_end_with_the_loader(pictures: Path) -> None:
    before = find_worker_processes() | find_fork_servers()
    loader = make_loader(pictures)
    loader.start_workers()
    del loader
    assert find_worker_processes() | find_fork_servers() == before


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1, "worker_init_fn": print}])
def test_nothing_is_started_where_shardio_has_no_worker_processes(pictures: Path, options: dict[str, object]) -> None:
    before = find_fork_servers()
    make_loader(pictures, **options).start_workers()  # type: ignore[arg-type]
    assert find_fork_servers() == before


def test_the_training_driver_starts_them_before_all_else(packed: Path) -> None:
    seen = list[int]()

    class Look(Callback):
        def wrap_model(self, model: nn.Module) -> nn.Module:
            seen.append(len(find_fork_servers() - before))
            return model

    dataset = ShardMapDataset(packed, fields=("image", "label"), transform=shardio.transforms.RandomResizedCrop(16))
    loader = DataLoader(dataset, 7, sampler=EpochSampler(dataset), num_workers=1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))
    before = find_fork_servers()
    train(model, loader, TrainConfig(epochs=1, precision="fp32", device="cpu"), callbacks=[Look()])
    assert seen == [1]
