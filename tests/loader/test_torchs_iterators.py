"""An iterator of the loader has the interface of torch's iterators, private names included, and holds no loader."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
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

PERSISTENT = {"num_workers": 1, "persistent_workers": True}

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 1}, PERSISTENT]


class Stream(IterableDataset[int]):
    """An iterable dataset."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def kinds(packed: Path) -> dict[str, dict[str, Any]]:
    """Return arguments for each way in which batches are made."""
    mapped = ShardMapDataset(packed, fields=("image", "key"), transform=CenterCrop(8))
    return {
        "any dataset": {"dataset": range(8)},
        "stream": {"dataset": Stream()},
        "decoded": {"dataset": mapped},
        "sampled": {"dataset": mapped, "sampler": EpochSampler(mapped)},
        "shards": {"dataset": ShardDataset(packed, fields=("image", "key"), transform=CenterCrop(8))},
        "called": {"dataset": ShardDataset(packed, fields="key"), "worker_init_fn": start},
        "datapipe": {"dataset": IterableWrapper(range(8))},
        "delivered": {"dataset": range(8), "device": "cpu", "check_duplicates": True},
    }


KINDS = ["any dataset", "stream", "decoded", "sampled", "shards", "called", "datapipe", "delivered"]


def make(packed: Path, kind: str, loader_class: Any = DataLoader, **options: Any) -> Any:
    return loader_class(**{"batch_size": 2, **kinds(packed)[kind], **options})


def start(_: int) -> None:
    """Do nothing in a worker."""


def count_workers() -> int:
    """Return how many worker processes there are, shardio's or others."""
    return len(multiprocessing.active_children()) + len(find_worker_processes())


@pytest.mark.parametrize("options", WORKERS[:2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_one_of_torchs_with_their_attributes(packed: Path, kind: str, options: dict[str, Any]) -> None:
    loader = make(packed, kind, **options)
    iterator = iter(loader)
    assert isinstance(iterator, _BaseDataLoaderIter)
    if kind != "delivered":
        assert isinstance(iterator, _MultiProcessingDataLoaderIter if options else _SingleProcessDataLoaderIter)
    torchs: Any = _BaseDataLoaderIter(loader)
    unlike = {"_sampler_iter", "_base_seed", "_profile_name"}
    drawn = {"_shared_seed"} if kind == "datapipe" else set()
    for name in vars(torchs).keys() - unlike - drawn:
        assert getattr(iterator, name) == getattr(torchs, name), name
    next(iterator)
    next(iterator)
    assert iterator._num_yielded == 2
    assert iter(iterator) is iterator
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            duplicate(iterator)


@pytest.mark.parametrize("options", WORKERS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_again(packed: Path, kind: str, options: dict[str, Any]) -> None:
    loader = make(packed, kind, **options)
    epochs = [str(list(loader)) for _ in range(3)]
    loader = make(packed, kind, **options)
    iterator = iter(loader)
    first = [next(iterator)]
    iterator._reset(loader)
    assert str(list(iterator)) == epochs[1]
    assert len(first) == 1
    assert list(iterator) == []
    iterator._reset(loader, first_iter=False)
    assert str(list(iterator)) == epochs[2]


@pytest.mark.parametrize("options", [{}, PERSISTENT], ids=str)
def test_it_draws_what_torchs_draw(options: dict[str, Any]) -> None:
    def run(base: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = base(range(12), 2, shuffle=True, **options)
        iterator = iter(loader)
        seen = [next(iterator).tolist(), iterator._next_index(), next(iterator).tolist()]
        seen.append(next(iterator._sampler_iter, None))
        iterator._reset(loader)
        return [*seen, [batch.tolist() for batch in iterator], torch.rand(1).item()]

    assert run(DataLoader) == run(TorchLoader)


@pytest.mark.parametrize("kind", ["any dataset", "decoded"])
def test_an_index_that_was_drawn_by_hand_is_not_delivered(packed: Path, kind: str) -> None:
    for num_workers in (0, 1):
        loader = make(packed, kind, num_workers=num_workers, sampler=RandomSampler(range(8)))
        iterator = iter(loader)
        drawn = [iterator._next_index()]
        received = [next(iterator) for _ in range(2)]
        assert len([*received, *iterator]) == 3
        assert len(drawn[0]) == 2


@pytest.mark.parametrize("options", WORKERS[1:], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_process_of_other_tests")
def test_frameworks_end_its_workers(packed: Path, kind: str, options: dict[str, Any]) -> None:
    loader = make(packed, kind, **options)
    epochs = [str(list(loader)) for _ in range(3)]
    loader = make(packed, kind, **options)
    iterator = iter(loader)
    assert str(list(iterator)) == epochs[0]
    iterator._shutdown_workers()  # After the last batch, persistent workers wait for the next epoch.
    wait_until(lambda: not count_workers())
    assert next(iterator, None) is None
    loader._iterator = None  # As Lightning does.
    iterator = iter(loader)
    next(iterator)
    iterator._shutdown_workers()
    iterator._shutdown_workers()
    wait_until(lambda: not count_workers())
    if kind != "delivered":
        with pytest.raises(RuntimeError, match="its workers were shut down"):
            next(iterator)
    loader._iterator = None
    assert str(list(loader)) == epochs[2]


@pytest.mark.parametrize("options", WORKERS[1:], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_that_keeps_its_iterator_is_released_with_its_workers(
    packed: Path, kind: str, options: dict[str, Any], no_process_of_other_tests: None
) -> None:
    class Keeping(DataLoader[Any]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.iterator = super().__iter__()

    with without_collector():
        loader = make(packed, kind, Keeping, **options)
        next(loader.iterator)
        watched = weakref.ref(loader)
        assert count_workers()
        del loader
        assert watched() is None
        wait_until(lambda: not count_workers())


def test_each_iterator_that_a_program_makes_has_persistent_workers_of_its_own() -> None:
    def run(base: Any) -> list[Any]:
        loader = base(range(8), 2, **PERSISTENT)
        first, second = loader._get_iterator(), loader._get_iterator()
        batches = [batch.tolist() for pair in zip(first, second, strict=True) for batch in pair]
        del first
        second._reset(loader)
        return [*batches, *[batch.tolist() for batch in second], *[batch.tolist() for batch in loader]]

    assert run(DataLoader) == run(TorchLoader)


def test_iterators_with_persistent_workers_begin_again_in_turn() -> None:
    def run(base: Any) -> list[Any]:
        loader = base(range(12), batch_size=3, num_workers=1, persistent_workers=True)
        iterators = [loader._get_iterator() for _ in range(2)]
        found = [batch.tolist() for iterator in iterators for batch in iterator]
        for _ in range(2):
            for iterator in iterators:
                iterator._reset(loader)
                found.append(next(iterator).tolist())
            found += [batch.tolist() for iterator in iterators for batch in iterator]
        return found

    assert run(DataLoader) == run(torch.utils.data.DataLoader)
