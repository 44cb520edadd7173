"""Faults in how workers and ranks share samples."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
)

from shardio import ShardDataset
from shardio.check import ExpectedSamples
from tests.check.cases import (
    N,
    Registry,
    Shares,
    check_ranks,
    cut,
    load,
    once,
)

case = Registry()


# Workers.


@case("no split by worker", "each of 2 workers delivered all 96 samples", slow=True)
def _(packed: Path) -> None:
    once(load(Shares(lambda worker, of: range(N)), num_workers=2), range(N))


@case("one sample too many at a worker's border", "the shares of workers overlap by 1", slow=True)
def _(packed: Path) -> None:
    def share(worker: int, of: int) -> range:
        return range(worker * N // of, min((worker + 1) * N // of + 1, N))

    once(load(Shares(share), num_workers=2), range(N))


@case("one sample too few at a worker's border", "1 never", slow=True)
def _(packed: Path) -> None:
    def share(worker: int, of: int) -> range:
        return range(worker * N // of, (worker + 1) * N // of - (worker == 0))

    once(load(Shares(share), num_workers=2), range(N))


@case("one sample too many at the border of persistent workers", "their shares probably overlap", slow=True)
def _(packed: Path) -> None:
    def share(worker: int, of: int) -> range:
        return range(worker * N // of, min((worker + 1) * N // of + 1, N))

    once(load(Shares(share), num_workers=2, persistent_workers=True), range(N))


@case("workers shuffle with different seeds", "each shuffles with its own seed", slow=True)
def _(packed: Path) -> None:
    def share(worker: int, of: int) -> list[int]:
        return random.Random(worker).sample(range(N), N)[worker::of]

    once(load(Shares(share), num_workers=2), range(N))


@case("shares of workers are rounded down", "each of 3 workers delivered 33 of 100 samples", slow=True)
def _(packed: Path) -> None:
    def share(worker: int, of: int) -> range:
        return range(worker * (100 // of), (worker + 1) * (100 // of))

    once(load(Shares(share), num_workers=3), range(100))


@case("WebDataset without workersplitter", "each of 2 workers delivered all", slow=True)
def _(packed: Path) -> None:
    tars = sorted(map(str, packed.glob("*.tar")))
    dataset = webdataset.WebDataset(tars, shardshuffle=False, workersplitter=None).map(lambda s: s["__key__"])
    once(load(dataset, num_workers=2), list(ShardDataset(packed, fields="key")))


@case("WebDataset that resamples", "more than once")
def _(packed: Path) -> None:
    tars = sorted(map(str, packed.glob("*.tar")))
    dataset = webdataset.WebDataset(tars, resampled=True, shardshuffle=False).map(lambda s: s["__key__"])
    once(load(dataset.with_epoch(42)), list(ShardDataset(packed, fields="key")))


# Ranks.


def samplers(world_size: int, **options: Any) -> list[DistributedSampler[Any]]:
    dataset: Any = range(N)
    return [DistributedSampler(dataset, world_size, rank, **options) for rank in range(world_size)]


def by(chosen: list[DistributedSampler[Any]]) -> tuple[DataLoader[Any], ...]:
    return tuple(load(sampler.dataset, sampler=sampler) for sampler in chosen)


@case("no split by rank", "ranks 0 and 1 delivered the same 96 samples")
def _(packed: Path) -> None:
    once((cut(range(N)), cut(range(N))), N)


@case("a sampler splits for four ranks, but there are two, nothing expected", "size of 4, but the world size is 2")
def _(packed: Path) -> None:
    check_ranks(by(samplers(4)[:2]), ExpectedSamples())


@case("no split by rank, each in another order", "ranks 0 and 1 delivered the same 96 samples")
def _(packed: Path) -> None:
    once((load(range(N), shuffle=True), load(range(N), shuffle=True)), N)


@case("the shares of two ranks overlap by one", "the shares of ranks overlap by 1 sample: check where each share ends")
def _(packed: Path) -> None:
    once((cut(range(49)), cut(range(48, N))), range(N))


@case("the shares of two ranks overlap by a batch and more", "the shares of ranks overlap by 12")
def _(packed: Path) -> None:
    once((cut(range(60)), cut(range(48, N))), range(N))


@case("each rank shuffles with its own seed", "epoch 0 and seed 0 on rank 0; epoch 0 and seed 1 on rank 1")
def _(packed: Path) -> None:
    dataset: Any = range(N)
    once(by([DistributedSampler(dataset, 2, rank, seed=rank) for rank in range(2)]), range(N))


@case("set_epoch on one rank only", "epoch 1 and seed 0 on rank 0; epoch 0 and seed 0 on rank 1")
def _(packed: Path) -> None:
    chosen = samplers(2)
    once(by(chosen), range(N), epochs=2, set_epoch=chosen[0].set_epoch)


@case("unknown loaders of two ranks shuffle with different seeds", "ranks repeat each other's samples and miss others")
def _(packed: Path) -> None:
    once(tuple(cut(random.Random(rank).sample(range(N), N)[rank::2]) for rank in range(2)), range(N))


@case("each of two ranks samples with replacement", "sampled with replacement")
def _(packed: Path) -> None:
    once(tuple(cut(random.Random(rank).choices(range(N), k=N // 2)) for rank in range(2)), range(N))


@case("shares of ranks are rounded down", "each of 3 ranks delivered 33 of 100 samples, and none delivered")
def _(packed: Path) -> None:
    once(tuple(cut(range(rank * 33, (rank + 1) * 33)) for rank in range(3)), range(100))


@case("ranks that swap epochs", "epoch 0 and seed 0 on rank 0; epoch 1 and seed 0 on rank 1")
def _(packed: Path) -> None:
    chosen = samplers(2)

    def swapped(epoch: int) -> None:
        for rank, sampler in enumerate(chosen):
            sampler.set_epoch((epoch + rank) % 2)

    once(by(chosen), range(N), epochs=2, set_epoch=swapped)


@case("set_epoch is never called", "epochs 0 and 1 have the same order: set_epoch is not called")
def _(packed: Path) -> None:
    once(by(samplers(2)), range(N), epochs=2)


@case("set_epoch is never called on a sampler in a BatchSampler", "epochs 0 and 1 have the same order: set_epoch")
def _(packed: Path) -> None:
    ranks = [BatchSampler(sampler, 8, drop_last=False) for sampler in samplers(2)]
    once(tuple(load(range(N), batch_size=1, batch_sampler=one) for one in ranks), N, epochs=2)


@case("a loader of unknown kind repeats an order", "epochs 0 and 2 have the same order")
def _(packed: Path) -> None:
    class Cycling:
        seeds = iter([0, 1, 0])

        def __iter__(self) -> Iterator[Any]:
            return iter(cut(random.Random(next(self.seeds)).sample(range(N), N)))

    once(Cycling(), N, epochs=3)


@case("an order repeats after another epoch", "epochs 0 and 2 have the same order")
def _(packed: Path) -> None:
    chosen = samplers(2)

    def cycle(epoch: int) -> None:
        for sampler in chosen:
            sampler.set_epoch(epoch % 2)

    once(by(chosen), range(N), epochs=3, set_epoch=cycle)


@case("one rank of two keeps its order", "epochs 0 and 1 have the same order on rank 1")
def _(packed: Path) -> None:
    class Own:
        def __init__(self, rank: int) -> None:
            self.rng, self.numbers = random.Random(rank), list(range(rank, N, 2))
            self.rng.shuffle(self.numbers)
            self.is_frozen = rank == 1

        def __iter__(self) -> Iterator[Any]:
            if not self.is_frozen:
                self.rng.shuffle(self.numbers)
            return iter(cut(self.numbers))

    once((Own(0), Own(1)), N, epochs=2)


@case("DistributedSampler pads", "all repeats (3) are in the last batch")
def _(packed: Path) -> None:
    dataset: Any = range(N + 1)
    once(by([DistributedSampler(dataset, 4, rank) for rank in range(4)]), range(N + 1))


@case(
    "DistributedSampler drops, and all samples are expected",
    "each of 4 ranks delivered 24 of 97 samples",
)
def _(packed: Path) -> None:
    dataset: Any = range(N + 1)
    once(by([DistributedSampler(dataset, 4, rank, drop_last=True) for rank in range(4)]), range(N + 1))


@case("one rank has no batches", "rank 1 delivered nothing")
def _(packed: Path) -> None:
    once((cut(range(0, N, 2)), []), range(N))
