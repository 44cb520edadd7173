"""Batch sizes that change: in the middle of an epoch, and between a state and the run that resumes from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import shardio
from shardio.errors import StateError

NUMBERS = list(range(41))


class Counting(IterableDataset[int]):
    """An iterable dataset without a state."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        return iter(NUMBERS if worker is None else NUMBERS[worker.id :: worker.num_workers])


def make(batch_size: int | None, num_workers: int, dataset: Any = NUMBERS, **options: Any) -> Any:
    return shardio.DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, **options)


def save_after(loader: Any, num_batches: int) -> tuple[dict[str, Any], list[int]]:
    """Return the state after some batches, and the samples that are left."""
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    return loader.state_dict(), [number for batch in batches for number in batch.tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_size_that_is_set_applies_when_it_does_in_torch(num_workers: int, drop_last: bool) -> None:
    def run(base: Any) -> list[list[int]]:
        loader = base(NUMBERS, batch_size=4, num_workers=num_workers, drop_last=drop_last)
        found = []
        for _ in range(2):
            for step, batch in enumerate(loader):
                found.append(batch.tolist())
                if step == 1:
                    loader.batch_sampler.batch_size = 3
        return found

    assert run(shardio.DataLoader) == run(torch.utils.data.DataLoader)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_run_may_have_batches_of_another_size(num_workers: int, batch_size: int, shuffle: bool) -> None:
    state, left = save_after(make(4, num_workers, shuffle=shuffle), 3)
    resumed = make(batch_size, num_workers, shuffle=shuffle)
    resumed.load_state_dict(state)
    batches = [batch.tolist() for batch in resumed]
    assert [number for batch in batches for number in batch] == left
    assert {len(batch) for batch in batches[:-1]} == {batch_size}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_its_state_after_that_counts_all_samples(num_workers: int) -> None:
    state, left = save_after(make(4, num_workers), 3)
    resumed = make(7, num_workers)
    resumed.load_state_dict(state)
    state, left = save_after(resumed, 2)
    again = make(4, num_workers)
    again.load_state_dict(state)
    assert [number for batch in again for number in batch.tolist()] == left == NUMBERS[12 + 14 :]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it in torch.
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [3, 8])
def test_a_state_of_torchdatas_loader_counts_samples_too(num_workers: int, batch_size: int) -> None:
    state, _ = save_after(StatefulDataLoader(NUMBERS, batch_size=4, num_workers=num_workers), 3)
    resumed = [make(batch_size, num_workers), StatefulDataLoader(NUMBERS, batch_size, num_workers=num_workers)]
    for loader in resumed:
        loader.load_state_dict(state)
    found, expected = ([batch.tolist() for batch in loader] for loader in resumed)
    assert found == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_size_that_changed_in_the_epoch_is_resumed(num_workers: int) -> None:
    loader = make(4, num_workers)
    batches, num_samples = iter(loader), 0
    for step in range(12):
        num_samples += len(next(batches))
        if step == 1:
            loader.batch_sampler.batch_size = 2
    resumed = make(2, num_workers)
    resumed.load_state_dict(loader.state_dict())
    assert [number for batch in resumed for number in batch.tolist()] == NUMBERS[num_samples:]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("saved", "loaded"), [(4, 8), (4, None)])
def test_batches_of_an_iterable_dataset_without_a_state_must_have_the_size(
    num_workers: int, saved: int, loaded: int | None
) -> None:
    state, _ = save_after(make(saved, num_workers, Counting()), 3)
    resumed = make(loaded, num_workers, Counting())
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match=f"batch_size={loaded}: use batch_size={saved}"):
        iter(resumed)


@pytest.mark.parametrize(("saved", "loaded"), [(4, None), (None, 4)])
def test_single_samples_and_batches_do_not_mix(saved: int | None, loaded: int | None) -> None:
    loader = make(saved, 0, collate_fn=torch.tensor)
    next(iter(loader))
    resumed = make(loaded, 0)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=f"use batch_size={saved}"):
        iter(resumed)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_an_epoch_the_size_may_change(num_workers: int) -> None:
    loader = make(4, num_workers, Counting())
    list(loader)
    resumed = make(6, num_workers, Counting())
    resumed.load_state_dict(loader.state_dict())
    assert sorted(number for batch in resumed for number in batch.tolist()) == NUMBERS
