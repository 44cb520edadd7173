"""What the loader adds to torch's arguments works with any dataset: devices, duplicates, out-of-order states."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import time
import weakref
from itertools import islice
from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import RandomSampler

import shardio
from shardio import CoverageError, DataLoader, DevicePrefetcher, IdentityError

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}]


class Twice(torch.utils.data.Sampler[int]):
    """Yields one index twice."""

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter([*range(11), 4])


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_device_is_that_of_a_prefetcher(workers: dict[str, Any]) -> None:
    loader = DataLoader(range(10), 4, device="cpu", **workers)
    assert len(loader) == len(iter(loader)) == 3
    expected = DevicePrefetcher(DataLoader(range(10), 4, **workers), "cpu")
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected]
    iterator = iter(loader)
    begun = next(iterator).tolist()
    for other in (DataLoader(range(10), 4, device="cpu"), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        other.load_state_dict(loader.state_dict())
        assert begun + [number for batch in other for number in batch.tolist()] == list(range(10))


def test_an_epoch_outlives_its_loader_and_ends_its_workers() -> None:
    iterator = iter(DataLoader(range(10), 4, num_workers=1, device="cpu", check_duplicates=True))
    assert len(list(iterator)) == 3
    loader = DataLoader(range(10), 4, num_workers=1, device="cpu", check_duplicates=True)
    watched, iterator = weakref.ref(loader), iter(loader)
    next(iterator)
    gc.disable()
    try:
        del loader
        assert watched() is None
        assert [next(iterator).tolist()] == [[4, 5, 6, 7]]
        del iterator
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", WORKERS, ids=str)
def test_a_repeated_sample_is_an_error(workers: dict[str, Any]) -> None:
    loader = DataLoader(range(12), 4, check_duplicates=True, **workers)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in loader]
    repeats = iter(DataLoader(range(12), 4, sampler=Twice(), check_duplicates=True, **workers))
    assert [batch.tolist() for batch in islice(repeats, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(CoverageError, match="batch 2 repeats 4, which batch 1 of this epoch delivered"):
        next(repeats)


def test_without_keys_contents_identify_samples() -> None:
    images = torch.arange(48.0).reshape(12, 4)
    data = torch.utils.data.TensorDataset(images, torch.arange(12))
    assert len(list(DataLoader(data, 4, shuffle=True, check_duplicates=True))) == 3
    assert len(list(iter(DataLoader(data, 4, check_duplicates=True)))) == 3
    with pytest.raises(IdentityError, match="holds a sample with the same content"):
        list(DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=40), check_duplicates=True))


def test_check_duplicates_is_a_flag() -> None:
    with pytest.raises(TypeError, match="check_duplicates must be True or False"):
        DataLoader(range(3), check_duplicates="yes")  # type: ignore[arg-type]  # the test


class Slow(torch.utils.data.Dataset[int]):
    """A dataset whose sample 0 takes longer than all others."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        time.sleep(0.2 if index == 0 else 0)
        return index


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_state_knows_what_was_delivered_out_of_order(method: Any) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Slow(), 2, num_workers=2, worker_method=method, in_order=False)

    for num_received in (1, 7):
        loader = make()
        received = [number for batch in islice(loader, num_received) for number in batch.tolist()]
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        rest = [number for batch in resumed for number in batch.tolist()]
        assert 0 not in received or num_received > 1
        assert sorted(received + rest) == list(range(24))


class Workers(torch.utils.data.Dataset[Any]):
    """Tells who reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        ours, torchs = shardio.get_worker_info(), torch.utils.data.get_worker_info()
        return ours is torchs, None if ours is None else ours.id


def test_in_processes_the_worker_is_torchs() -> None:
    for num_workers in (0, 2):
        seen = list(DataLoader(Workers(), None, num_workers=num_workers))
        assert seen == [[True, index % 2 if num_workers else None] for index in range(8)]
