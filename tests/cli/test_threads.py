"""torch leaves processors to the loader's workers, unless the user chose its number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardio.cli import training
from shardio.cli.training import VARIABLES, choose_threads, leave_processors_to_workers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def six_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch use six threads on a machine with eight processors, without a choice of the user."""
    monkeypatch.setattr(training, "count_processors", lambda: 8)
    for name in (*VARIABLES, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_processors", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 100])
def test_threads_and_workers_of_all_ranks_share_the_processors(
    num_processors: int, num_ranks: int, num_workers: int
) -> None:
    num_threads = choose_threads(num_processors, num_ranks, num_workers)
    assert num_threads >= 1
    assert num_threads == 1 or num_ranks * (num_threads + num_workers) <= num_processors
    assert num_ranks * (num_threads + num_workers + 1) > num_processors, "at most one processor per rank stays idle"


def test_the_number_is_set_and_reported() -> None:
    message = leave_processors_to_workers(3, CPU, 6)
    assert torch.get_num_threads() == 5
    assert message is not None
    assert message.startswith("torch uses 5 of its 6 threads")
    assert "(processors: 8, ranks: 1, workers: 3)" in message


def test_the_ranks_of_a_machine_share_its_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = leave_processors_to_workers(1, CPU, 6)
    assert torch.get_num_threads() == 3
    assert "(processors: 8, ranks: 2, workers: 1)" in str(message)


@pytest.mark.parametrize("name", VARIABLES)
def test_the_number_in_a_variable_is_kept(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "6")
    assert leave_processors_to_workers(3, CPU, 6) is None
    assert torch.get_num_threads() == 6


def test_a_number_that_was_set_since_the_start_is_kept() -> None:
    assert leave_processors_to_workers(3, CPU, 4) is None
    assert torch.get_num_threads() == 6


def test_threads_are_kept_if_torch_computes_on_a_gpu() -> None:
    assert leave_processors_to_workers(3, torch.device("cuda"), 6) is None
    assert torch.get_num_threads() == 6


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_threads_are_kept_if_processors_remain(num_workers: int) -> None:
    assert leave_processors_to_workers(num_workers, CPU, 6) is None
    assert torch.get_num_threads() == 6
