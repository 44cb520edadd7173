"""Iterators have the interface of torch's iterators, including private names."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import DataLoader as TorchLoader, IterableDataset, RandomSampler
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _MultiProcessingDataLoaderIter,
    _SingleProcessDataLoaderIter,
)
from torch.utils.data.datapipes.iter import IterableWrapper

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.transforms import CenterCrop
from tests.buffers import find_worker_processes, wait_until, without_collector
from tests.faults.worker_processes import is_alive
from tests.loader.programs import Called, Shares
from tests.processes import run_python

ONE: dict[str, Any] = {"num_workers": 1}
PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
LOADERS: list[Any] = [TorchLoader, DataLoader]


def kinds(packed: Path) -> dict[str, dict[str, Any]]:
    mapped = ShardMapDataset(packed, fields=("image", "key"), transform=CenterCrop(8))
    return {
        "any dataset": {"dataset": range(8)},
        "stream": {"dataset": Shares(lambda *_: range(8))},
        "decoded": {"dataset": mapped},
        "sampled": {"dataset": mapped, "sampler": EpochSampler(mapped)},
        "shards": {"dataset": ShardDataset(packed, fields=("image", "key"), transform=CenterCrop(8))},
        "called": {"dataset": ShardDataset(packed, fields="key"), "worker_init_fn": id},
        "datapipe": {"dataset": IterableWrapper(range(8))},
        "delivered": {"dataset": range(8), "device": "cpu", "check_duplicates": True},
    }


KINDS = ["any dataset", "stream", "decoded", "sampled", "shards", "called", "datapipe", "delivered"]
QUICK = ("any dataset", "decoded", "delivered")
ENDING = pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(pytest.param(kind, PERSISTENT, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS),
        *(pytest.param(kind, ONE, marks=pytest.mark.slow) for kind in QUICK[:2]),
    ],
)


def make(packed: Path, kind: str, loader_class: Any = DataLoader, **options: Any) -> Any:
    return loader_class(**{"batch_size": 2, **kinds(packed)[kind], **options})


@pytest.fixture
def find_workers(no_process_of_other_tests: None) -> Callable[[], set[Any]]:
    others = set(multiprocessing.active_children())  # Servers of some other tests run until the session ends.
    return lambda: (set(multiprocessing.active_children()) - others) | find_worker_processes()


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, {}) for kind in KINDS), ("any dataset", ONE), ("decoded", ONE), ("datapipe", ONE)]
)
def test_it_is_one_of_torchs_with_their_attributes(packed: Path, kind: str, options: dict[str, Any]) -> None:
    loader = make(packed, kind, **options)
    iterator = iter(loader)
    assert isinstance(iterator, _BaseDataLoaderIter)
    if kind != "delivered":
        assert isinstance(iterator, _MultiProcessingDataLoaderIter if options else _SingleProcessDataLoaderIter)
    torchs: Any = _BaseDataLoaderIter(loader)
    unlike = {"_sampler_iter", "_base_seed", "_profile_name", *(["_shared_seed"] if kind == "datapipe" else [])}
    for name in vars(torchs).keys() - unlike:
        assert getattr(iterator, name) == getattr(torchs, name), name
    next(iterator)
    next(iterator)
    assert iterator._num_yielded == 2
    assert iter(iterator) is iterator
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            duplicate(iterator)


@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in KINDS), ("shards", PERSISTENT)])
def test_it_begins_again(packed: Path, kind: str, options: dict[str, Any]) -> None:
    loader = make(packed, kind, **options)
    epochs = [str(list(loader)) for _ in range(3)]
    loader = make(packed, kind, **options)
    iterator = iter(loader)
    next(iterator)
    iterator._reset(loader)
    assert str(list(iterator)) == epochs[1]
    assert list(iterator) == []
    iterator._reset(loader, first_iter=False)
    assert str(list(iterator)) == epochs[2]


def draw(base: Any, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(3)
    loader = base(range(12), 2, shuffle=True, **options)
    iterator = iter(loader)
    seen = [next(iterator).tolist(), iterator._next_index(), next(iterator).tolist()]
    seen.append(next(iterator._sampler_iter, None))
    iterator._reset(loader)
    return [*seen, [batch.tolist() for batch in iterator], torch.rand(1).item()]


def begin_several(base: Any, options: dict[str, Any]) -> list[Any]:
    """Create several iterators, each with its own persistent workers, and reset them one after the other."""
    loader = base(range(12), batch_size=3, **options)
    iterators = [loader._get_iterator() for _ in range(2)]
    found = [batch.tolist() for pair in zip(*iterators, strict=True) for batch in pair]
    for _ in range(2):
        for iterator in iterators:
            iterator._reset(loader)
            found.append(next(iterator).tolist())
        found += [batch.tolist() for iterator in iterators for batch in iterator]
    return [*found, *(batch.tolist() for batch in loader)]


def share(base: Any, options: dict[str, Any]) -> list[Any]:
    """Draw from two iterators of one loader. With persistent workers, the two iterators are the same object in torch,
    so they share its batches."""
    loader = base(range(24), batch_size=4, **options)
    first, second = iter(loader), iter(loader)
    found = [next(first).tolist(), next(second).tolist(), next(first).tolist()]
    return [*found, *([one.tolist() for one in pair] for _ in range(2) for pair in zip(loader, loader, strict=True))]


@pytest.mark.parametrize(
    ("use", "options"),
    [(draw, {}), (draw, PERSISTENT), (begin_several, PERSISTENT), (share, {}), (share, ONE), (share, PERSISTENT)],
)
def test_programs_find_the_same_in_it_as_in_torchs(use: Any, options: dict[str, Any]) -> None:
    assert use(DataLoader, options) == use(TorchLoader, options)


@pytest.mark.parametrize("kind", ["any dataset", "decoded"])
def test_an_index_that_was_drawn_by_hand_is_not_delivered(packed: Path, kind: str) -> None:
    iterator = iter(make(packed, kind, sampler=RandomSampler(range(8))))
    assert len(iterator._next_index()) == 2
    assert len(list(iterator)) == 3


@ENDING
def test_frameworks_end_its_workers(
    packed: Path, kind: str, options: dict[str, Any], find_workers: Callable[[], set[Any]]
) -> None:
    loader = make(packed, kind)
    epochs = [str(list(loader)) for _ in range(3)]
    loader = make(packed, kind, **options)
    iterator = iter(loader)
    assert str(list(iterator)) == epochs[0]
    iterator._shutdown_workers()  # Persistent workers would wait for the next epoch.
    wait_until(lambda: not find_workers())
    assert next(iterator, None) is None
    loader._iterator = None  # As Lightning does.
    iterator = iter(loader)
    next(iterator)
    iterator._shutdown_workers()
    iterator._shutdown_workers()
    wait_until(lambda: not find_workers())
    if kind != "delivered":
        with pytest.raises(RuntimeError, match="its workers were shut down"):
            next(iterator)
    loader._iterator = None
    assert str(list(loader)) == epochs[2]


@ENDING
def test_a_loader_that_keeps_its_iterator_is_released_with_its_workers(
    packed: Path, kind: str, options: dict[str, Any], find_workers: Callable[[], set[Any]]
) -> None:
    class Keeping(DataLoader[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.iterator = super().__iter__()

    with without_collector():
        loader = make(packed, kind, Keeping, **options)
        next(loader.iterator)
        watched = weakref.ref(loader)
        assert find_workers()
        del loader
        assert watched() is None
        wait_until(lambda: not find_workers())


class Stream(IterableDataset[int]):
    """A stream of four 2-sample batches, the second of which fails. Its ``__len__`` returns too small a number."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return map(fail_at_four, range(1, 9))


def fail_at_four(number: int) -> int:
    if number == 4:
        raise ValueError("the fourth")
    return number


def receive(loader: Any) -> list[str]:
    batches, seen = iter(loader), list[str]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while not seen or seen[-1] != "the end":
            try:
                seen.append(str(next(batches, "the end")))
            except ValueError as error:  # noqa: PERF203  # Any batch may fail. Torch adds the worker's traceback.
                seen.append(str(error).splitlines()[-1].removeprefix("ValueError: "))
    return seen + [f"{each.category.__name__}: {str(each.message)[:40]}" for each in caught]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_continues_after_an_error_and_warns_of_a_wrong_length(num_workers: int) -> None:
    torchs, ours = (loader(Stream(), batch_size=2, num_workers=num_workers) for loader in LOADERS)
    assert len(torchs) == len(ours) == 1
    assert receive(ours) == (expected := receive(torchs))
    for words in ("the fourth", "Length of IterableDataset"):
        assert any(words in each for each in expected)


def test_an_iterator_has_the_length_of_torchs() -> None:
    for options in ({"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}):
        assert {len(iter(each(range(10), **options))) for each in LOADERS} == {len(DataLoader(range(10), **options))}
    for each in LOADERS:
        with pytest.raises(TypeError, match="has no len"):
            len(iter(each(Stream())))


def test_a_users_tensors_are_made_in_the_users_modes() -> None:
    loader = DataLoader(Called(lambda _: torch.ones(2), 4), batch_size=4)
    with torch.device("meta"):
        (on_meta,) = loader
    with torch.inference_mode():
        (for_inference,) = loader
    assert (on_meta.device.type, on_meta.is_inference(), for_inference.is_inference()) == ("meta", False, True)


def test_persistent_workers_end_with_their_loader_and_their_settings() -> None:
    loader = DataLoader(range(4), batch_size=2, **PERSISTENT)
    epochs, pids = list[Any](), list[Any]()
    for collate_fn in (np.sum, np.sum, np.prod):
        loader.collate_fn = collate_fn
        epochs.append(list(loader))
        assert isinstance(loader._iterator, _MultiProcessingDataLoaderIter), "frameworks use this to end workers"
        pids += [worker.pid for worker in loader._iterator._workers]
    assert epochs == [[1, 5], [1, 5], [0, 6]]
    assert pids[0] == pids[1] != pids[2]
    with without_collector():
        del loader
        assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_libraries_use_the_loader_that_is_swapped_in(packed: Path) -> None:
    run = run_python(Path(__file__).with_name("swapped_in.py"), packed)
    assert (run.stdout.splitlines()[-1:], run.stderr, run.returncode) == (["all is well"], "", 0)
