"""``start_workers``: worker processes that start before their epoch are those that make it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import shardio
from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.loader.processes.fork_server import end_kept
from shardio.train import Callback, TrainConfig, train
from shardio.transforms import Compose, RandomResizedCrop
from tests.buffers import (
    assert_same,
    find_fork_servers,
    find_worker_processes,
    has_ended,
    make_loader,
    make_oracle,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("no_process_of_other_tests")


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


def as_environment_says() -> Callable[[Any], Any]:
    """Return a function that is sent by value: worker processes would take seconds to import this module."""

    def transform(image: Any) -> Any:
        return np.full((1, 1, 3), int(os.environ.get("BRIGHTNESS", "0")), np.uint8)

    return transform


@pytest.mark.parametrize("transform", [RandomResizedCrop(48), Compose([RandomResizedCrop(48), np.negative])])
def test_later_epochs_have_new_worker_processes_of_the_same_fork_server(pictures: Path, transform: Any) -> None:
    dataset = ShardDataset(pictures, fields=("image", "key"), shuffle=True, transform=transform)
    loader, oracle = DataLoader(dataset, 8, num_workers=2), DataLoader(dataset, 8)
    before, seen = find_fork_servers(), list[set[int]]()
    for _ in range(3):
        iterator = iter(loader)
        got = [next(iterator)]
        seen.append(find_worker_processes())
        got += iterator
        assert find_worker_processes().isdisjoint(seen[-1]), "an epoch's worker processes end with it"
        assert_same(got, list(oracle))
        assert len(find_fork_servers() - before) == 1
    assert len(set().union(*seen)) == 3 * 2
    (server,) = find_fork_servers() - before
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1
    del loader, iterator
    end_kept()
    assert find_fork_servers() == before


def test_epochs_at_the_same_time_have_their_own_fork_servers(pictures: Path) -> None:
    loader, oracle = make_loader(pictures), make_oracle(pictures)
    before, first, second = find_fork_servers(), iter(loader), iter(loader)
    assert_same(list(zip(first, second, strict=True)), list(zip(list(oracle), list(oracle), strict=True)))
    assert len(find_fork_servers() - before) == 2
    del first
    assert len(find_fork_servers() - before) == 1, "the second one's is kept for the next epoch"


def test_a_fork_server_that_died_between_epochs_is_replaced_in_silence(pictures: Path) -> None:
    loader, oracle, before = make_loader(pictures), make_oracle(pictures), find_fork_servers()
    for _ in range(2):
        assert_same(list(loader), list(oracle))
        (server,) = find_fork_servers() - before
        os.kill(server, signal.SIGKILL)
        wait_until(partial(has_ended, server))


def test_a_changed_environment_reaches_peoples_code(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ShardMapDataset(pictures, fields="image", transform=as_environment_says())
    loader = DataLoader(dataset, 8, num_workers=1)
    for brightness in (0, 7, 7, 9):
        monkeypatch.setenv("BRIGHTNESS", str(brightness))
        assert next(iter(loader)).unique().tolist() == [brightness]


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
