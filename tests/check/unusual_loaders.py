"""Unusual loaders of torch that are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torchdata.stateful_dataloader
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DistributedSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)

from shardio.check import ExpectedSamples
from tests.check.cases import (
    B,
    Images,
    N,
    Registry,
    Shares,
    check_ranks,
    cut,
    load,
    once,
)

case = Registry()
NOTHING = ExpectedSamples()


def numbers(worker: int, of: int) -> range:
    return range(worker, N, of)


# torch's loader.


@case("torch, nothing expected")
def _(packed: Path) -> None:
    once(load(range(N)))


@case("torch, shuffled, a short last batch, three epochs")
def _(packed: Path) -> None:
    once(load(range(N + 3), shuffle=True), range(N + 3), epochs=3)


@case("torch, unshuffled, three epochs, nothing expected")
def _(packed: Path) -> None:
    once(load(Images()), epochs=3)


@case("torch, unshuffled, three epochs, the number expected")
def _(packed: Path) -> None:
    once(load(Images()), N, epochs=3)


@case("torch with 2 workers", slow=True)
def _(packed: Path) -> None:
    once(load(range(N), num_workers=2), range(N))


@case("torch with persistent workers, three epochs", slow=True)
def _(packed: Path) -> None:
    once(load(range(N), num_workers=2, persistent_workers=True, shuffle=True), range(N), epochs=3)


@case("torch with batches in the order of completion", slow=True)
def _(packed: Path) -> None:
    once(load(range(N), num_workers=2, in_order=False), range(N))


@case("an iterable dataset that splits by worker", slow=True)
def _(packed: Path) -> None:
    once(load(Shares(numbers), num_workers=3), range(N), epochs=2)


@case("an iterable dataset in persistent workers, unshuffled, two epochs", slow=True)
def _(packed: Path) -> None:
    once(load(Shares(numbers), num_workers=2, persistent_workers=True), range(N), epochs=2)


@case("workers with uneven shares", slow=True)
def _(packed: Path) -> None:
    once(load(Shares(lambda worker, of: range(90) if worker == 0 else range(90, N)), num_workers=2), range(N))


@case("torchdata's StatefulDataLoader")
def _(packed: Path) -> None:
    once(torchdata.stateful_dataloader.StatefulDataLoader(Images(), batch_size=B, shuffle=True), epochs=2)


@case("a part of a dataset by SubsetRandomSampler, nothing expected")
def _(packed: Path) -> None:
    once(load(Images(), sampler=SubsetRandomSampler(range(10, 50))))


@case("a part of a dataset by random_split")
def _(packed: Path) -> None:
    first, second = random_split(Images(), [60, 36])
    once(load(first))
    once(load(second, shuffle=True))


@case("datasets end to end, and in a chain")
def _(packed: Path) -> None:
    parts: list[Any] = [list(range(50)), list(range(50, N))]
    once(load(ConcatDataset(parts), shuffle=True), range(N))
    once(load(ChainDataset([Shares(lambda worker, of: range(50)), Shares(lambda worker, of: range(50, N))])), range(N))


@case("a user-defined batch sampler")
def _(packed: Path) -> None:
    batches = [list(range(60)), list(range(60, N))]
    once(load(range(N), batch_size=1, batch_sampler=batches), range(N))
    once(load(Images(), batch_size=1, batch_sampler=batches))


@case("a weighted sampler without replacement")
def _(packed: Path) -> None:
    once(load(range(N), sampler=WeightedRandomSampler([1.0 + n for n in range(N)], N, replacement=False)), range(N))


@case("DistributedSampler, unshuffled, three epochs")
def _(packed: Path) -> None:
    dataset: Any = Images()
    ranks: list[Any] = [DistributedSampler(dataset, 2, rank, shuffle=False) for rank in range(2)]
    once(tuple(load(dataset, sampler=sampler) for sampler in ranks), epochs=3)


@case("DistributedSampler with drop_last that drops nothing")
def _(packed: Path) -> None:
    dataset: Any = range(N)
    ranks: list[Any] = [DistributedSampler(dataset, 4, rank, drop_last=True) for rank in range(4)]
    once(tuple(load(dataset, sampler=sampler) for sampler in ranks), range(N))


@case("DistributedSampler with drop_last that drops, by the command, nothing expected")
def _(packed: Path) -> None:
    dataset: Any = range(N + 1)
    ranks: list[Any] = [DistributedSampler(dataset, 4, rank, drop_last=True) for rank in range(4)]
    check_ranks([load(dataset, sampler=sampler, drop_last=True) for sampler in ranks], NOTHING)


@case("each rank has a dataset of its own, uneven")
def _(packed: Path) -> None:
    once(tuple(load(list(range(start, stop)), shuffle=True) for start, stop in ((0, 70), (70, 71), (71, N))))


@case("one rank of two has nothing to do")
def _(packed: Path) -> None:
    once((cut(range(5)), []), range(5))
