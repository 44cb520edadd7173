"""torch leaves processors to the loader's workers, unless the user chose its threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardio.train import threads
from shardio.train.threads import VARIABLES, choose_threads, set_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def six_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch computes in six threads, on a machine of eight processors, and nobody chose."""
    monkeypatch.setattr(threads, "count_processors", lambda: 8)
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
    number = choose_threads(num_processors, num_ranks, num_workers)
    assert number >= 1
    assert number == 1 or num_ranks * (number + num_workers) <= num_processors
    assert num_ranks * (number + num_workers + 1) > num_processors, "no more processors are left idle than ranks"


def test_the_number_is_set_and_said() -> None:
    said = set_threads(3, CPU, 6)
    assert torch.get_num_threads() == 5
    assert said is not None
    assert said.startswith("torch computes in 5 of its 6 threads")
    assert "(processors: 8, ranks: 1, workers: 3)" in said


def test_ranks_of_a_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = set_threads(1, CPU, 6)
    assert torch.get_num_threads() == 3
    assert "(processors: 8, ranks: 2, workers: 1)" in str(said)


@pytest.mark.parametrize("name", VARIABLES)
def test_what_a_variable_says_is_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "6")
    assert set_threads(3, CPU, 6) is None
    assert torch.get_num_threads() == 6


def test_what_was_set_meanwhile_is_left_alone() -> None:
    assert set_threads(3, CPU, 4) is None
    assert torch.get_num_threads() == 6


def test_only_training_on_a_cpu_counts() -> None:
    assert set_threads(3, torch.device("cuda"), 6) is None
    assert torch.get_num_threads() == 6


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_nothing_is_said_or_done_where_torch_takes_no_more_by_itself(num_workers: int) -> None:
    assert set_threads(num_workers, CPU, 6) is None
    assert torch.get_num_threads() == 6
