"""Loaders of shardio's datasets in the order of torch's samplers resume exactly: order, crops and later epochs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from shardio import DataLoader, DevicePrefetcher, ImageFolder, ShardMapDataset, StateError
from shardio.transforms import RandomResizedCrop
from tests.buffers import assert_same

NUM_BATCHES = 6


class Stateful(Sampler[int]):
    """A sampler that says where it is, and begins at 3 in each epoch but the first."""

    def __init__(self) -> None:
        self.number = 0

    def __len__(self) -> int:
        return 21

    def __iter__(self) -> Iterator[int]:
        while self.number < 21:
            self.number += 1
            yield self.number - 1
        self.number = 3

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


SAMPLERS: dict[str, Any] = {
    "torch's": lambda dataset: {"shuffle": True},
    "a generator": lambda dataset: {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
    "repeats": lambda dataset: {"sampler": WeightedRandomSampler([1.0] * 21, 21)},
    "distributed": lambda dataset: {"sampler": DistributedSampler(dataset, num_replicas=1, rank=0)},
    "a state": lambda dataset: {"sampler": Stateful()},
    "sampler's generator": lambda dataset: {
        "sampler": RandomSampler(dataset, generator=torch.Generator().manual_seed(6))
    },
}


class Run:
    """A training run: two epochs and the batches that it receives."""

    def __init__(self, packed: Path, sampler: str, *, sets_epoch: bool, **workers: Any) -> None:
        torch.manual_seed(11)
        self.dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(16))
        self.loader: Any = DataLoader(self.dataset, 4, **SAMPLERS[sampler](self.dataset), **workers)
        self.sets_epoch = sets_epoch

    def receive(self, first_epoch: int = 0) -> Iterator[tuple[int, Any, dict[str, Any]]]:
        """Yield each epoch's batches with the state after them, as a checkpoint holds it."""
        for epoch in range(first_epoch, 3):
            if self.sets_epoch:
                self.dataset.set_epoch(epoch)
            for batch in self.loader:
                yield epoch, batch, json.loads(json.dumps(self.loader.state_dict()))


@pytest.mark.parametrize("sets_epoch", [False, True])
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(packed: Path, sampler: str, sets_epoch: bool) -> None:
    received = list(Run(packed, sampler, sets_epoch=sets_epoch).receive())
    batches = [batch for _, batch, _ in received]
    for stop in (1, NUM_BATCHES, NUM_BATCHES + 3):
        epoch, _, state = received[stop - 1]
        resumed = Run(packed, sampler, sets_epoch=sets_epoch)
        torch.manual_seed(99)  # A state does not depend on the generators of the process that loads it.
        resumed.loader.load_state_dict(state)
        assert_same([batch for _, batch, _ in resumed.receive(epoch)], batches[stop:])


@pytest.mark.parametrize("workers", [{"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_workers_change_nothing(packed: Path, workers: dict[str, Any]) -> None:
    received = list(Run(packed, "torch's", sets_epoch=False, **workers).receive())
    for stop in (2, NUM_BATCHES, NUM_BATCHES + 1):
        epoch, _, state = received[stop - 1]
        resumed = Run(packed, "torch's", sets_epoch=False, **workers)
        resumed.loader.load_state_dict(state)
        assert_same([batch for _, batch, _ in resumed.receive(epoch)], [batch for _, batch, _ in received[stop:]])
    epoch, _, state = received[1]
    other = Run(packed, "torch's", sets_epoch=False)
    other.loader.load_state_dict(state)
    first = [batch for number, batch, _ in other.receive() if number == 0]
    assert_same(first, [batch for number, batch, _ in received[2:] if number == 0])


def test_a_prefetchers_state_is_that_of_the_batch_that_was_received(packed: Path) -> None:
    whole = [keys for _, keys in Run(packed, "torch's", sets_epoch=False, num_workers=1).loader]
    prefetcher = DevicePrefetcher(Run(packed, "torch's", sets_epoch=False, num_workers=1).loader, "cpu")
    for number, _ in enumerate(prefetcher, start=1):
        resumed = Run(packed, "torch's", sets_epoch=False).loader
        resumed.load_state_dict(prefetcher.state_dict())
        assert [keys for _, keys in resumed] == whole[number:]


def test_a_directory_has_a_state_too(images: Path) -> None:
    def make() -> Any:
        torch.manual_seed(2)
        return DataLoader(ImageFolder(images, transform=RandomResizedCrop(16)), 4, shuffle=True)

    whole = list(make())
    loader = make()
    for number, _ in enumerate(loader, start=1):
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert_same(list(resumed), whole[number:])


def test_states_of_other_kinds_of_loaders_are_refused(packed: Path) -> None:
    dataset = ShardMapDataset(packed)
    with pytest.raises(StateError, match="was not saved by a loader of this kind"):
        DataLoader(dataset, 4).load_state_dict({"epoch": 1, "position": 4})
    assert DataLoader(dataset, 4).has_state
    assert not DataLoader(dataset, 4).has_order
