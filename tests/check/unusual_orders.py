"""Right loaders whose order is the same in several epochs, on purpose or by chance."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset
from torch.utils.data import BatchSampler, DistributedSampler, Sampler, Subset, SubsetRandomSampler

from shardio import ShardDataset
from tests.check.cases import B, Images, N, Registry, cut, load, once

case = Registry()
MIXED = random.Random(0).sample(range(N), N)


class Sorted(Sampler[int]):
    """Sorts by the last digit in every epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(N), key=lambda number: (number % 10, number)))

    def __len__(self) -> int:
        return N


class OwnOrder(DistributedSampler[Any]):
    """Always uses the same order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(MIXED[self.rank :: self.num_replicas])


@case("a fixed sampler, two epochs")
def _(packed: Path) -> None:
    once(load(range(N), sampler=MIXED), range(N), epochs=2)
    once(load(range(N), sampler=MIXED), N, epochs=2)


@case("a sampler that sorts, two epochs")
def _(packed: Path) -> None:
    once(load(range(N), sampler=Sorted()), range(N), epochs=2)


@case("a subclass of DistributedSampler with a fixed order, two epochs")
def _(packed: Path) -> None:
    ranks: list[Any] = [OwnOrder(range(N), 2, rank) for rank in range(2)]  # type: ignore[arg-type]  # it has a length
    once(tuple(load(range(N), sampler=sampler) for sampler in ranks), range(N), epochs=2)


@case("a Subset of a permutation, two epochs")
def _(packed: Path) -> None:
    dataset: Any = range(N)
    once(load(Subset(dataset, MIXED)), range(N), epochs=2)


@case("plain batches of a permutation, on two ranks, two epochs")
def _(packed: Path) -> None:
    once((cut(MIXED[::2]), cut(MIXED[1::2])), range(N), epochs=2)


@case("BatchSampler around DistributedSampler, two epochs")
def _(packed: Path) -> None:
    dataset: Any = range(N)
    chosen: list[DistributedSampler[Any]] = [DistributedSampler(dataset, 2, rank) for rank in range(2)]

    def set_epoch(epoch: int) -> None:
        for sampler in chosen:
            sampler.set_epoch(epoch)

    batches = [BatchSampler(sampler, B, drop_last=False) for sampler in chosen]
    ranks = tuple(load(dataset, batch_size=1, batch_sampler=one) for one in batches)
    once(ranks, range(N), epochs=2, set_epoch=set_epoch)
    once(ranks, epochs=2, set_epoch=set_epoch)


@case("BatchSampler around SubsetRandomSampler, nothing expected")
def _(packed: Path) -> None:
    once(load(Images(), batch_size=1, batch_sampler=BatchSampler(SubsetRandomSampler(range(10, 50)), B, False)))


@case("three fixed batches in random order, eight epochs")
def _(packed: Path) -> None:
    rng = random.Random(1)

    class Few:
        def __iter__(self) -> Iterator[list[int]]:
            return iter(rng.sample(cut(MIXED, 32), 3))

    once(load(range(N), batch_size=1, batch_sampler=Few()), range(N), epochs=8)


@case("WebDataset that shuffles four shards, and nothing in them, twelve epochs")
def _(packed: Path) -> None:
    tars = sorted(map(str, packed.glob("*.tar")))
    dataset = webdataset.WebDataset(tars, shardshuffle=100).map(lambda sample: sample["__key__"])
    once(load(dataset), list(ShardDataset(packed, fields="key")), epochs=12)
