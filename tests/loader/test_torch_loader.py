"""Loaders in an order that is not shardio's behave like torch's, except that no error ends an epoch in silence."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from shardio import DataLoader
from tests.faults.worker_processes import is_alive

LOADERS: list[Any] = [torch.utils.data.DataLoader, DataLoader]


class Stream(IterableDataset[int]):
    """Four batches of 2, of which the second fails. Its length announces fewer samples than there are batches."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return Failing()


class Failing(Iterator[int]):
    """An iterator that continues after its error."""

    def __init__(self) -> None:
        self._number = 0

    def __next__(self) -> int:
        self._number += 1
        if self._number == 4:
            raise ValueError("the fourth")
        if self._number > 8:
            raise StopIteration
        return self._number


class Made:
    """A dataset of tensors that are made where torch's default device is."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)


class Interrupted:
    """A dataset whose third sample is interrupted when it is first read."""

    is_over = False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2 and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt
        return index


def describe(loader: Any) -> list[str]:
    """Return an epoch's batches, errors and warnings."""
    batches = iter(loader)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = list(iter(lambda: describe_next(batches), "the end"))
    return seen + [f"{each.category.__name__}: {str(each.message)[:40]}" for each in caught]


def describe_next(batches: Iterator[Any]) -> str:
    try:
        return str(next(batches, "the end"))
    except ValueError as error:
        return str(error).splitlines()[-1].removeprefix("ValueError: ")  # torch writes the worker's traceback here.


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_continues_after_an_error_and_warns_of_a_wrong_length(num_workers: int) -> None:
    torchs, ours = (make(Stream(), batch_size=2, num_workers=num_workers) for make in LOADERS)
    assert len(torchs) == len(ours) == 1
    expected = describe(torchs)
    assert describe(ours) == expected
    assert any("the fourth" in each for each in expected)
    assert any("Length of IterableDataset" in each for each in expected)


def test_an_iterator_has_the_length_of_torchs() -> None:
    for options in ({"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": None}):
        assert {len(iter(make(range(10), **options))) for make in LOADERS} == {len(DataLoader(range(10), **options))}
    for make in LOADERS:
        with pytest.raises(TypeError, match="has no len"):
            len(iter(make(Stream())))


def test_a_users_tensors_are_made_in_the_users_modes() -> None:
    torch.set_default_device("meta")
    try:
        (batch,) = DataLoader(Made(), batch_size=4)
    finally:
        torch.set_default_device(None)
    assert batch.device.type == "meta"
    with torch.inference_mode():
        (batch,) = DataLoader(Made(), batch_size=4)
    assert batch.is_inference()


def test_an_interrupted_batch_is_not_left_out_in_silence() -> None:
    batches = iter(DataLoader(Interrupted(), batch_size=2))
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            next(batches)


def test_persistent_workers_end_with_their_loader_and_their_settings() -> None:
    loader = DataLoader(range(4), batch_size=2, num_workers=1, persistent_workers=True)
    epochs, pids = list[Any](), list[Any]()
    for collate_fn in (np.sum, np.sum, np.prod):
        loader.collate_fn = collate_fn
        epochs.append(list(loader))
        assert isinstance(loader._iterator, _MultiProcessingDataLoaderIter), "frameworks end workers through it"
        pids += [worker.pid for worker in loader._iterator._workers]
    assert epochs == [[1, 5], [1, 5], [0, 6]]
    assert pids[0] == pids[1] != pids[2]
    gc.disable()  # Workers end when the last reference goes, not when the collector finds a cycle.
    try:
        del loader
        assert not any(map(is_alive, pids))
    finally:
        gc.enable()


def test_all_iterators_of_persistent_workers_share_their_batches() -> None:
    """In torch, they are one object."""
    for make in LOADERS:
        loader = make(range(6), batch_size=2, num_workers=1, persistent_workers=True)
        first = iter(loader)
        second = iter(loader)
        assert [next(first).tolist(), next(second).tolist(), next(first).tolist()] == [[0, 1], [2, 3], [4, 5]]
