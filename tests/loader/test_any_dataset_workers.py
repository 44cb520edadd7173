"""Worker processes and threads for any dataset: failures lose no batch, and workers end with their loader."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch._C import _error_if_any_worker_fails, _remove_worker_pids, _set_worker_pids
from torch.utils.data import IterableDataset

import shardio
from shardio import DataLoader, StateError, WorkerError
from shardio.loader import buffers, fetch_pool, wire
from shardio.loader.fetch_job import make_failing_job
from shardio.loader.fetch_pool import describe_death
from shardio.loader.fetch_worker import run_worker_process
from shardio.loader.wire import make_pair
from shardio.process import describe_exit
from tests.buffers import find_buffers
from tests.files import find_open_files
from tests.loader.programs import Called, Shares, flatten

METHODS: dict[str, Any] = {"caller": {}, "process": {"num_workers": 1}}
METHODS["thread"] = {"num_workers": 1, "worker_method": "thread"}
THREADS: dict[str, Any] = {"num_workers": 3, "worker_method": "thread"}
workers_only = pytest.mark.parametrize("method", ["process", "thread"])


class Shared(torch.utils.data.IterableDataset[int]):
    """A stream of numbers, with its position as an attribute, that can be copied but not pickled."""

    def __init__(self, size: int = 20) -> None:
        self.size, self.number, self.memory = size, 0, threading.Lock()

    def __copy__(self) -> Shared:
        return Shared(self.size)

    def __iter__(self) -> Iterator[int]:
        info = shardio.get_worker_info()
        worker_id, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        while self.number < len(numbers := range(worker_id, self.size, num_workers)):
            self.number += 1
            yield numbers[self.number - 1]
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def make_numbers(before: Any = None, number: int = 4) -> Called:
    def get(index: int) -> int:
        if before is not None and index == number:
            before()
        return index

    return Called(get, 10)


def fail(kind: type[BaseException], *arguments: Any) -> None:
    raise kind(*arguments)


def numbers(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@workers_only
def test_a_batch_may_take_as_long_as_the_timeout(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_pool, "CHECK_S", 0.05)  # By default, this interval is 100 times as long.
    slow = make_numbers(partial(time.sleep, 0.5))
    assert numbers(DataLoader(slow, 2, timeout=60, **METHODS[method]))[2] == [4, 5]
    batches = iter(DataLoader(slow, 2, timeout=0.2, **METHODS[method]))
    assert numbers(islice(batches, 2)) == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match=r"timed out after 0.2 seconds"):
        next(batches)
    time.sleep(0.5)
    assert next(batches).tolist() == [4, 5], "a late batch is not lost"


@pytest.mark.parametrize(
    ("method", "stage"), [("caller", "dataset"), ("caller", "collate"), ("process", "dataset"), ("thread", "collate")]
)
def test_a_failed_batch_counts_when_the_next_one_is_requested(method: str, stage: str) -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        if stage == "collate" and 4 in samples:
            raise LookupError("four")
        return torch.tensor(samples)

    dataset = make_numbers(partial(fail, LookupError, "four")) if stage == "dataset" else make_numbers()
    loader = DataLoader(dataset, 2, collate_fn=collate, **METHODS[method])
    batches = iter(loader)
    assert numbers(islice(batches, 2)) == [[0, 1], [2, 3]]
    with pytest.raises(LookupError, match="four"):
        next(batches)
    states = [loader.state_dict()]
    assert next(batches).tolist() == [6, 7]
    states.append(loader.state_dict())
    for state, rest in zip(states, ([[4, 5], [6, 7], [8, 9]], [[8, 9]]), strict=True):
        resumed = DataLoader(make_numbers(), 2, **METHODS[method])
        resumed.load_state_dict(state)
        assert numbers(resumed) == rest


@pytest.mark.parametrize("dataset", [make_numbers(), Shared(10)])
def test_ctrl_c_while_a_batch_is_made_does_not_lose_it(dataset: Any) -> None:
    def collate(samples: list[int]) -> torch.Tensor:
        if 2 in samples and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return torch.tensor(samples)

    interrupted = list[bool]()
    in_dataset = DataLoader(make_numbers(partial(fail, KeyboardInterrupt), number=2), 2)
    loader = DataLoader(dataset, 2, collate_fn=collate)
    for each in (in_dataset, loader):
        batches = iter(each)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"KeyboardInterrupt.*loader.load_state_dict\(loader.state_dict"):
                next(batches)
    loader.load_state_dict(state := loader.state_dict())
    assert numbers(loader) == [[2, 3], [4, 5], [6, 7], [8, 9]]
    other = DataLoader(Shares(lambda *_: range(10)), 2)
    other.load_state_dict(state)
    if isinstance(dataset, Shared):
        with pytest.raises(StateError, match="with state_dict and load_state_dict, but this object lacks"):
            iter(other)


def test_if_memory_is_short_buffers_are_fewer_and_no_batch_is_lost_unless_two_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffers, "find_available_bytes", lambda: 150_000)
    large = [np.full(2000, number) for number in range(40)]
    with pytest.warns(RuntimeWarning, match="memory is low: only 1 of 2 workers can fetch at once"):
        received = list(DataLoader(large, 4, num_workers=2, in_order=False))
    assert sorted(int(batch[0, 0]) for batch in received) == list(range(0, 40, 4))
    del received
    endless = Shares(lambda *_: itertools.repeat(np.zeros(100_000)))
    monkeypatch.setattr(buffers, "find_available_bytes", lambda: 12 * 4 * 800_000)
    batches = iter(DataLoader(endless, 4, num_workers=2, prefetch_factor=10))
    for _ in range(30):
        next(batches)
    assert len(find_buffers()) <= 8
    monkeypatch.setattr(buffers, "find_available_bytes", lambda: 4_000_000)
    batches = iter(DataLoader(endless, 4, num_workers=2))
    with pytest.raises(
        MemoryError, match=r"two batches of 3\.052 MiB do not fit into the 3\.815 MiB .* smaller batch_s"
    ):
        next(batches)


class Flaky(IterableDataset[int]):
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
        batches = iter(loader_class(make_numbers(), 2, worker_init_fn=fail_to_begin, **METHODS[method]))
        with pytest.raises(OSError, match="worker 0 has no disk"):
            next(batches)
    loader = DataLoader(Flaky(), 2, persistent_workers=True, **METHODS[method])
    with pytest.raises(OSError, match="not yet"):
        next(iter(loader))
    assert numbers(loader) == [[0, 1], [2, 3]]
    for init in (None, fail_to_begin) if method == "thread" else ():
        loader = DataLoader(Flaky(), 2, persistent_workers=True, worker_init_fn=init, **METHODS["thread"])
        with suppress(OSError):
            next(iterator := iter(loader))
        (thread,) = iterator._workers
        del loader, iterator
        gc.collect()
        thread.join(60)
        assert not thread.is_alive()


def test_threads_are_awaited_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_pool, "JOIN_S", 0.2)
    all_fetch, may_end = threading.Barrier(5), threading.Event()

    def get(index: int) -> None:
        all_fetch.wait()
        may_end.wait()

    waits = list[float]()
    batches: Any = iter(DataLoader(Called(get), sampler=[0] * 4, num_workers=4, worker_method="thread"))

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
        thread.join(60)


class Arrays(torch.utils.data.Dataset[Any]):
    """Arrays that are large enough for buffers. If ``fatal`` is given, reading one of the arrays ends the worker."""

    def __init__(self, fatal: Any = None) -> None:
        self.fatal = fatal

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if self.fatal is not None and index == 17:
            if isinstance(self.fatal, int):
                os.kill(os.getpid(), self.fatal)
                time.sleep(60)
            os._exit(3)
        return np.full(2000, index)


DEATHS = [
    (signal.SIGKILL, "Killed (SIGKILL). Memory has probably run out: use fewer workers, a smaller prefetch_factor"),
    (signal.SIGBUS, "Bus error (SIGBUS). Shared memory has probably run out: use fewer workers or smaller batches"),
    (signal.SIGSEGV, "Segmentation fault (SIGSEGV). A library crashed in the dataset or collate_fn: use num_worke"),
    (signal.SIGUSR1, "User defined signal 1 (SIGUSR1). Another process may have ended it"),
    (signal.SIGRTMIN + 1, "Real-time signal 1. Another process may have ended it"),
    ("exit", "exited unexpectedly with exit code 3. Standard error may show why. Use num_workers=0 to debug"),
]


@pytest.mark.parametrize("fatal", [signal.SIGKILL, "exit"], ids=str)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_dead_worker_is_an_error_after_which_the_loader_works_again(fatal: Any, persistent: bool) -> None:
    others = set(multiprocessing.active_children())
    loader = DataLoader(dataset := Arrays(fatal), 4, num_workers=2, persistent_workers=persistent)
    batches = iter(loader)
    numbers = list[Any]()
    with pytest.raises(WorkerError, match=r"DataLoader worker \(pid\(s\) \d+\) .*(SIGKILL|exit code 3)") as caught:  # noqa: PT012
        for batch in batches:
            numbers.append(batch[:, 0].tolist())  # The batches before the error are checked.
    assert isinstance(caught.value, RuntimeError), "torch's error is also a RuntimeError"
    assert numbers == [list(range(first, first + 4)) for first in range(0, 4 * len(numbers), 4)]
    with pytest.raises(RuntimeError, match=r"call loader.load_state_dict\(loader.state_dict\(\)\) first"):
        next(batches)
    dataset.fatal = None
    loader.load_state_dict(loader.state_dict())
    further = [batch[:, 0].tolist() for batch in loader]
    assert further == [list(range(first, first + 4)) for first in range(4 * len(numbers), 40, 4)]
    assert persistent or set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize(("fatal", "message"), DEATHS, ids=str)
def test_the_error_of_a_dead_worker_has_the_words_of_torchs_and_says_cause_and_remedy(fatal: Any, message: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=Arrays(fatal).__getitem__, args=(17,))
    process.start()
    assert process.pid is not None
    with pytest.raises(RuntimeError, match="DataLoader worker") as caught:  # noqa: PT012  # SIGCHLD may also raise it
        _set_worker_pids(0, (process.pid,))
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        _error_if_any_worker_fails()
    _remove_worker_pids(0)
    process.join()
    words = str(caught.value).partition(". ")[0]
    assert words in str(describe_death(process))
    assert message in str(describe_death(process))
    assert words in describe_exit(f"DataLoader worker (pid {process.pid})", process.exitcode or 0)


@pytest.mark.parametrize("is_collected", [True, False])
@pytest.mark.parametrize("job", [None, make_failing_job(ValueError())], ids=["no job", "job"])
def test_a_worker_ends_if_its_loaders_process_ended_first(
    job: Any, is_collected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "CHECK_PARENT_S", 0.05)
    training = subprocess.Popen(["true"])  # Starting a multiprocessing process collects the ones that have ended.
    os.waitid(os.P_PID, training.pid, os.WEXITED | os.WNOWAIT)
    if is_collected:
        training.wait()
    end, workers = make_pair()  # This process keeps its socket open, as a fork of the training process does.
    with end, workers:
        arguments = workers, job, 0, 0, training.pid
        worker = multiprocessing.get_context("fork").Process(target=run_worker_process, args=arguments)
        worker.start()
        worker.join(20)
        exit_code = worker.exitcode
        worker.kill()  # Otherwise, a worker that continues would keep the tests from ending.
        worker.join()
    training.wait()
    assert exit_code == 0


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_loaders_that_are_left_early_leave_nothing(method: Any) -> None:
    def leave_one() -> Any:
        loader = DataLoader(Arrays(), 4, num_workers=1, worker_method=method)
        return list(islice(loader, 5))[-1]

    others = set(multiprocessing.active_children())
    kept = [leave_one() for _ in range(3)]
    gc.collect()
    files, num_threads, num_buffers = find_open_files(), threading.active_count(), len(find_buffers()) - len(kept)
    for _ in range(8):
        kept = [leave_one() for _ in range(2)]
        assert [int(batch[0, 0]) for batch in kept] == [16, 16]
    del kept
    gc.collect()
    assert find_open_files() <= files
    assert threading.active_count() <= num_threads
    assert len(find_buffers()) <= max(num_buffers, 0)
    assert set(multiprocessing.active_children()) <= others


def test_each_thread_is_a_worker_and_nothing_is_copied_or_pickled() -> None:
    begun = list[tuple[int, int, str]]()

    def init(worker_id: int) -> None:
        begun.append((worker_id, shardio.get_worker_info().id, threading.current_thread().name))

    def find(index: int) -> Any:
        info = shardio.get_worker_info()
        return info.id, info.num_workers, info.dataset is dataset, info.worker_method, info.seed - info.id

    dataset = Called(find, 30)
    seen = list(DataLoader(dataset, None, worker_init_fn=init, generator=torch.Generator().manual_seed(1), **THREADS))
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(1)))
    assert seen == [[number % 3, 3, True, "thread", seed] for number in range(30)]
    assert sorted(begun) == [(number, number, f"shardio-worker-{number}") for number in range(3)]
    assert shardio.get_worker_info() is None
    samples = [(threading.Lock(), object()) for _ in range(10)]
    received = [sample for batch in DataLoader(samples, 2, collate_fn=list, **THREADS) for sample in batch]
    assert all(one is other for one, other in zip(received, samples, strict=True))


@pytest.mark.parametrize("num_received", [0, 2, 7])
def test_iterable_datasets_have_their_own_positions_and_resume(num_received: int) -> None:
    whole = flatten(DataLoader(Shared(), 3, **THREADS))
    assert sorted(whole) == list(range(20))
    loader, resumed = (DataLoader(Shared(), 3, **THREADS) for _ in range(2))
    begun = flatten(islice(iter(loader), num_received))
    resumed.load_state_dict(loader.state_dict())
    assert begun + flatten(resumed) == whole
    if num_received > 0:
        other = DataLoader(Shared(), 3, **{**THREADS, "num_workers": 2})
        other.load_state_dict(loader.state_dict())
        with pytest.raises(StateError, match="num_workers=2"):
            iter(other)


def draw_from_worker(_: int) -> tuple[float, float, float]:
    rng = shardio.get_worker_info().rng
    draw = rng.random_generator.random(), float(torch.rand((), generator=rng.torch_generator))
    return *draw, float(rng.numpy_generator.random())


def test_the_generators_of_a_thread_are_seeded_as_those_of_a_process() -> None:
    def run(draw: Any, method: str) -> list[Any]:
        seeded = torch.Generator().manual_seed(5)
        options: dict[str, Any] = {"num_workers": 3, "worker_method": method, "generator": seeded}
        return list(DataLoader(Called(draw), None, **options))

    drawn = run(draw_from_worker, "thread")
    assert drawn == run(draw_from_worker, "thread")
    assert [values[:2] for values in drawn] == run(
        lambda _: (random.random(), float(torch.rand(()))), "multiprocessing"
    )
    assert len(set(map(tuple, drawn))) == 12


def test_a_dataset_that_cannot_know_its_share_is_warned_of_once() -> None:
    whole = type("Whole", (IterableDataset,), {"__iter__": lambda dataset: iter(range(4))})()
    with pytest.warns(RuntimeWarning, match=r"Whole did not call shardio.get_worker_info\(\), so each of 3") as caught:
        assert len(flatten(DataLoader(whole, 2, **THREADS))) == 12
    assert len([each for each in caught if each.category is RuntimeWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flatten(DataLoader(whole, 2, num_workers=1, worker_method="thread"))


def test_errors_name_the_sample_and_keep_their_traceback() -> None:
    def fail(index: int) -> int:
        if index == 7:
            raise LookupError("seven is missing")
        return index

    batches = iter(DataLoader(Called(fail), 2, **THREADS))
    assert flatten(islice(batches, 3)) == list(range(6))
    with pytest.raises(LookupError, match="seven is missing") as caught:
        next(batches)
    assert caught.value.__notes__ == ["while getting sample 7 of Called"]
    assert "fail" in {frame.name for frame in caught.traceback}
    assert flatten(batches) == [8, 9, 10, 11]
