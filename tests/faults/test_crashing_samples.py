"""Samples that kill the processes that decode them are found, and no other samples are blamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardio import WorkerError
from shardio.loader.processes import pool as pool_module
from tests.faults.worker_processes import (
    BATCH_SIZE,
    Batches,
    Data,
    Expected,
    batches_of,
    collect,
    install_poison,
    make_loader,
    warns_of_deaths,
)

pytestmark = pytest.mark.usefixtures("no_worker_process_is_left")


def sample_of(batches: Batches, number: int) -> str:
    key = batches[number][2][3]
    assert isinstance(key, str)
    return key


def test_two_deaths_over_the_same_batch_are_survived(data: Data, expected: Expected, modules: Path) -> None:
    install_poison(modules, sample_of(expected["shards"][0], 3), 2)
    loader = make_loader(data, "shards", 3)
    with warns_of_deaths():
        assert batches_of(loader) == expected["shards"][0]
    assert len(list(modules.glob("death-*"))) == loader.stats().num_worker_restarts == 2


def test_a_sample_that_always_kills_its_worker_process_is_named(data: Data, expected: Expected, modules: Path) -> None:
    number = 4
    key, others = sample_of(expected["shards"][0], number), expected["shards"][0][number][2]
    install_poison(modules, key, 100)
    loader = make_loader(data, "shards", 1, persistent_workers=True)
    batches = Batches()
    with (
        warns_of_deaths(),
        pytest.raises(WorkerError, match=r"3 worker processes.* signal: Aborted") as error_info,
    ):
        collect(loader, batches)
    assert batches == expected["shards"][0][:number]
    assert loader.state_dict()["position"] == number * BATCH_SIZE
    assert key in str(error_info.value)
    named = str(error_info.value).rpartition(": ")[2].split(", ")
    assert set(named) <= set(others)
    assert len(list(modules.glob("death-*"))) == 3


@pytest.mark.parametrize(("num_processes", "number"), [(1, 0), (2, 3)])
def test_samples_made_at_the_same_time_as_a_crashing_one_are_not_blamed(
    data: Data, expected: Expected, modules: Path, monkeypatch: pytest.MonkeyPatch, num_processes: int, number: int
) -> None:
    """Not even if they take so long that they are in flight at each death."""
    monkeypatch.setattr(
        pool_module, "divide_threads", lambda num_threads, _: [num_threads // num_processes] * num_processes
    )
    key, others = sample_of(expected["shards"][0], number), expected["shards"][0][number][2]
    install_poison(modules, key, 100, others_s=0.1)
    batches = Batches()
    said = r"3 worker processes died while processing the same samples"
    with warns_of_deaths(), pytest.raises(WorkerError, match=said) as error_info:
        collect(make_loader(data, "shards", 6), batches)
    assert batches == expected["shards"][0][:number]
    named = str(error_info.value).rpartition(": ")[2].split(", ")
    assert key in named
    assert set(named) <= set(others)
    # The first death may have several samples to choose from, and does not count then.
    assert len(list(modules.glob("death-*"))) in (3, 4)


def test_batches_in_flight_at_a_death_are_delivered(
    data: Data, expected: Expected, modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: [num_threads])
    install_poison(modules, sample_of(expected["shards"][0], 1), 2, others_s=0.1)
    loader = make_loader(data, "shards", 6, persistent_workers=True)
    with warns_of_deaths():
        assert [batches_of(loader), batches_of(loader)] == expected["shards"]
