"""Failures while any dataset is read: the error arrives, and no batch that the user lacks is lost from the state."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset

from shardio import DataLoader, StateError
from shardio.loader import buffers, fetch_workers
from tests.processes import run_python

JOIN_S = 60.0

METHODS: dict[str, dict[str, Any]] = {
    "caller": {},
    "process": {"num_workers": 1},
    "thread": {"num_workers": 1, "worker_method": "thread"},
}
workers_only = pytest.mark.parametrize("method", ["process", "thread"])


class Numbers(torch.utils.data.Dataset[Any]):
    """Numbers, with something done before one of them."""

    def __init__(self, before: Any = None, number: int = 4) -> None:
        self.before, self.number = before, number

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if self.before is not None and index == self.number:
            self.before()
        return index


def fail(kind: type[BaseException], *arguments: Any) -> None:
    raise kind(*arguments)


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@workers_only
def test_a_batch_may_take_as_long_as_the_timeout(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_workers, "CHECK_S", 0.05)  # As if the batch took 100 times as long.
    slow = Numbers(partial(time.sleep, 0.5))
    assert numbers(DataLoader(slow, 2, timeout=60, **METHODS[method]))[2] == [4, 5]
    batches = iter(DataLoader(slow, 2, timeout=0.2, **METHODS[method]))
    assert numbers(islice(batches, 2)) == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match=r"timed out after 0.2 seconds"):
        next(batches)
    time.sleep(0.5)
    assert next(batches).tolist() == [4, 5], "it came late, and is not lost"


@pytest.mark.parametrize(
    ("method", "stage"), [("caller", "dataset"), ("caller", "collate"), ("process", "dataset"), ("thread", "collate")]
)
def test_a_failed_batch_counts_when_the_next_one_is_requested(method: str, stage: str) -> None:
    """As in shardio's own order: a run that ends with the error resumes at that batch."""

    def collate(samples: list[int]) -> torch.Tensor:
        if stage == "collate" and 4 in samples:
            raise LookupError("four")
        return torch.tensor(samples)

    dataset = Numbers(partial(fail, LookupError, "four")) if stage == "dataset" else Numbers()
    loader = DataLoader(dataset, 2, collate_fn=collate, **METHODS[method])
    batches = iter(loader)
    assert numbers(islice(batches, 2)) == [[0, 1], [2, 3]]
    with pytest.raises(LookupError, match="four"):
        next(batches)
    states = [loader.state_dict()]
    assert next(batches).tolist() == [6, 7]
    states.append(loader.state_dict())
    for state, rest in zip(states, ([[4, 5], [6, 7], [8, 9]], [[8, 9]]), strict=True):
        resumed = DataLoader(Numbers(), 2, **METHODS[method])
        resumed.load_state_dict(state)
        assert numbers(resumed) == rest


class Counting(IterableDataset[int]):
    """Numbers with a state, from its own position on."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < 10:
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Stateless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("dataset", [Numbers, Counting])
def test_ctrl_c_while_a_batch_is_made_does_not_lose_it(dataset: Any) -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        if 2 in samples and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return torch.tensor(samples)

    interrupted = list[bool]()
    in_dataset = DataLoader(Numbers(partial(fail, KeyboardInterrupt), number=2), 2)
    loader = DataLoader(dataset(), 2, collate_fn=collate)
    for each in (in_dataset, loader):
        batches = iter(each)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"KeyboardInterrupt.*loader.load_state_dict\(loader.state_dict\(\)\)"
            ):
                next(batches)
    loader.load_state_dict(state := loader.state_dict())
    assert numbers(loader) == [[2, 3], [4, 5], [6, 7], [8, 9]]
    other = DataLoader(Stateless(), 2)
    other.load_state_dict(state)
    if dataset is Counting:
        with pytest.raises(StateError, match="with state_dict and load_state_dict, but this one lacks these methods"):
            iter(other)


def test_no_batch_is_lost_in_any_order_if_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then fewer batches than workers may be fetched at a time."""
    monkeypatch.setattr(buffers, "find_available_bytes", lambda: 150_000)
    large = [np.full(2000, number) for number in range(40)]
    with pytest.warns(RuntimeWarning, match="memory is short: only 1 of 2 workers can fetch at a time"):
        received = list(DataLoader(large, 4, num_workers=2, in_order=False))
    assert sorted(int(batch[0, 0]) for batch in received) == list(range(0, 40, 4))


class Flaky(IterableDataset[int]):
    """A dataset that cannot be opened at first."""

    num_tries = 0

    def __iter__(self) -> Iterator[int]:
        self.num_tries += 1
        if self.num_tries == 1:
            raise OSError("not yet")
        return iter(range(4))


def fail_to_begin(worker_id: int) -> None:
    raise OSError(f"worker {worker_id} has no disk")


@workers_only
def test_the_error_of_a_beginning_is_that_of_the_first_batch_and_persistent_workers_try_again(method: str) -> None:
    for loader_class in (DataLoader, torch.utils.data.DataLoader)[: 1 + (method == "process")]:
        batches = iter(loader_class(Numbers(), 2, worker_init_fn=fail_to_begin, **METHODS[method]))
        with pytest.raises(OSError, match="worker 0 has no disk"):
            next(batches)
    loader = DataLoader(Flaky(), 2, persistent_workers=True, **METHODS[method])
    with pytest.raises(OSError, match="not yet"):
        next(iter(loader))
    assert numbers(loader) == [[0, 1], [2, 3]]


def test_threads_end_although_an_error_was_raised() -> None:
    """The error's traceback holds the loader, so its worker must not hold the error."""
    for init in (None, fail_to_begin):
        loader = DataLoader(Flaky(), 2, persistent_workers=True, worker_init_fn=init, **METHODS["thread"])
        with suppress(OSError):
            next(batches := iter(loader))
        (thread,) = batches._workers
        del loader, batches
        gc.collect()
        thread.join(JOIN_S)
        assert not thread.is_alive()


def test_threads_are_awaited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for as long as one of them may take, not for the sum."""
    monkeypatch.setattr(fetch_workers, "JOIN_S", 0.2)
    all_fetch, may_end = threading.Barrier(5), threading.Event()

    def block() -> None:
        all_fetch.wait()
        may_end.wait()

    batches = iter(DataLoader(Numbers(block, number=0), sampler=[0] * 4, num_workers=4, worker_method="thread"))
    waits = list[float]()

    def note(join: Any, timeout: float) -> None:
        waits.append(timeout)
        join(timeout)

    for thread in (threads := batches._workers):
        monkeypatch.setattr(thread, "join", partial(note, thread.join))
    all_fetch.wait()
    del batches
    assert [wait > 0 for wait in waits] == [True, False, False, False]
    may_end.set()
    for thread in threads:
        thread.join(JOIN_S)


FORKED = """
import os
from shardio import DataLoader

loader = DataLoader(range(6), 2, num_workers=1, persistent_workers=True, worker_method={method!r})
batches = iter(loader)
next(batches)
if os.fork() == 0:
    try:
        next(batches)
    except RuntimeError as error:
        print(error, flush=True)
    print([batch.tolist() for batch in loader], flush=True)
    loader._iterator._shutdown_workers()
    os._exit(0)
os.wait()
print([batch.tolist() for batch in batches])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_forked_child_has_workers_of_its_own(method: str, tmp_path: Path) -> None:
    (tmp_path / "fork.py").write_text(FORKED.format(method=method))
    finished = run_python(tmp_path / "fork.py")
    assert (finished.returncode, finished.stderr) == (0, "")
    lines = finished.stdout.splitlines()
    assert "belongs to the parent of this forked process: call iter(loader) again" in lines[0]
    assert lines[1:] == ["[[0, 1], [2, 3], [4, 5]]", "[[2, 3], [4, 5]]"]
