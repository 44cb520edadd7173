"""Workers that are threads: the whole signature, one dataset, and a worker's number and generators for each thread."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.utils.data

import shardio
from shardio import DataLoader, StateError
from tests.loader.fetching.programs import flatten

THREADS: dict[str, Any] = {"num_workers": 3, "worker_method": "thread"}


class Shared(torch.utils.data.IterableDataset[int]):
    """Numbers that the workers share, with a position as an attribute."""

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


class Whole(torch.utils.data.IterableDataset[int]):
    """Numbers that every worker yields, because torch's function says nothing."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4)) if torch.utils.data.get_worker_info() is None else iter([])


def test_nothing_is_copied_or_pickled() -> None:
    samples = [(threading.Lock(), object()) for _ in range(10)]
    loader = DataLoader(samples, 2, collate_fn=lambda batch: batch, **THREADS)
    received = [sample for batch in loader for sample in batch]
    assert all(one is other for one, other in zip(received, samples, strict=True))


def test_each_thread_is_a_worker() -> None:
    begun = list[tuple[int, int, str]]()

    def init(worker_id: int) -> None:
        info = shardio.get_worker_info()
        begun.append((worker_id, info.id, threading.current_thread().name))

    class Workers(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, index: int) -> Any:
            info = shardio.get_worker_info()
            return info.id, info.num_workers, info.dataset is self, info.worker_method, info.seed - info.id

    dataset = Workers()
    seen = list(DataLoader(dataset, None, worker_init_fn=init, generator=torch.Generator().manual_seed(1), **THREADS))
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(1)))
    assert seen == [[number % 3, 3, True, "thread", seed] for number in range(30)]
    assert sorted(begun) == [(number, number, f"shardio-worker-{number}") for number in range(3)]
    assert shardio.get_worker_info() is None


def draw_from_worker(_: int) -> tuple[float, float, float]:
    rng = shardio.get_worker_info().rng
    draw = rng.random_generator.random(), float(torch.rand((), generator=rng.torch_generator))
    return *draw, float(rng.numpy_generator.random())


def draw_from_globals(_: int) -> tuple[float, float]:
    return random.random(), float(torch.rand(()))


class Draws(torch.utils.data.Dataset[Any]):
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return self.draw(index)


def test_the_generators_of_a_thread_are_seeded_as_those_of_a_process() -> None:
    def run(draw: Any, method: str) -> list[Any]:
        seeded = torch.Generator().manual_seed(5)
        options: dict[str, Any] = {"num_workers": 3, "worker_method": method, "generator": seeded}
        return list(DataLoader(Draws(draw), None, **options))

    drawn = run(draw_from_worker, "thread")
    assert drawn == run(draw_from_worker, "thread")
    assert [values[:2] for values in drawn] == run(draw_from_globals, "multiprocessing")
    assert len(set(map(tuple, drawn))) == 12


@pytest.mark.parametrize("num_received", [0, 2, 7])
def test_iterable_datasets_have_their_own_positions_and_resume(num_received: int) -> None:
    whole = flatten(DataLoader(Shared(), 3, **THREADS))
    assert sorted(whole) == list(range(20))
    loader = DataLoader(Shared(), 3, **THREADS)
    batches = iter(loader)
    begun = flatten(islice(batches, num_received))
    resumed = DataLoader(Shared(), 3, **THREADS)
    resumed.load_state_dict(loader.state_dict())
    assert begun + flatten(resumed) == whole
    if num_received > 0:
        other = DataLoader(Shared(), 3, num_workers=2, worker_method="thread")
        other.load_state_dict(loader.state_dict())
        with pytest.raises(StateError, match="num_workers=2"):
            iter(other)


def test_a_dataset_that_cannot_know_its_share_is_warned_of_once() -> None:
    with pytest.warns(RuntimeWarning, match=r"Whole did not call shardio.get_worker_info\(\), so each of 3") as caught:
        assert len(flatten(DataLoader(Whole(), 2, **THREADS))) == 12
    assert len([each for each in caught if each.category is RuntimeWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flatten(DataLoader(Whole(), 2, num_workers=1, worker_method="thread"))


def test_errors_name_the_sample_and_keep_their_traceback() -> None:
    def fail(index: int) -> int:
        if index == 7:
            raise LookupError("seven is missing")
        return index

    batches = iter(DataLoader(Draws(fail), 2, **THREADS))
    assert flatten(islice(batches, 3)) == list(range(6))
    with pytest.raises(LookupError, match="seven is missing") as caught:
        next(batches)
    assert caught.value.__notes__ == ["while getting sample 7 of Draws"]
    assert "fail" in {frame.name for frame in caught.traceback}
    assert flatten(batches) == [8, 9, 10, 11]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_threads_end_with_their_loader(is_persistent: bool) -> None:
    def count() -> int:
        return sum(thread.name.startswith("shardio-worker") for thread in threading.enumerate())

    gc.collect()  # Tracebacks of expected errors hold loaders of other tests.
    loader = DataLoader(range(50), 2, persistent_workers=is_persistent, **THREADS)
    list(loader)
    assert count() == (3 if is_persistent else 0)
    batches = iter(loader)
    next(batches)
    assert count() == 3
    del batches, loader
    assert count() == 0
