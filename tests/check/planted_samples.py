"""Faults in one stream of samples: some repeat, others are lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from shardio.check import ExpectedSamples
from tests.check.cases import (
    B,
    Flipped,
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
MILLION = 10**6


def millions(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[torch.Tensor]:
    numbers = torch.arange(MILLION) * 999_983 % MILLION  # A prime: all numbers, scattered.
    return iter(change(numbers).split(10_000))


def with_row(numbers: torch.Tensor, row: int, value: int) -> torch.Tensor:
    numbers[row] = value
    return numbers


# Samples that come again, in one stream.


@case("one sample of 10^6 twice", "1 more than once", slow=True)
def _(packed: Path) -> None:
    once(millions(lambda numbers: torch.cat([numbers, numbers[500_000:500_001]])), MILLION)


@case("one sample of 10^6 in place of another", "1 more than once, 1 never", slow=True)
def _(packed: Path) -> None:
    once(millions(lambda numbers: with_row(numbers, 5, 77)), range(MILLION))


@case("one sample of 10^6 in place of another, number expected", "1 more than once, 1 never", slow=True)
def _(packed: Path) -> None:
    once(millions(lambda numbers: with_row(numbers, 5, 77)), MILLION)


@case("an unexpected sample among 10^6", "1 never, 1 unexpected", slow=True)
def _(packed: Path) -> None:
    once(millions(lambda numbers: with_row(numbers, 5, -1)), range(MILLION))


@case("the first batch twice", "batch 0 of rank 0 and batch 1 of rank 0 hold the same samples")
def _(packed: Path) -> None:
    once([cut(range(N))[0], *cut(range(N))], N)


@case("the last batch twice on one rank of two", "batch 5 of rank 1 and batch 6 of rank 1 hold the same samples")
def _(packed: Path) -> None:
    once((cut(range(0, N, 2)), [*cut(range(1, N, 2)), cut(range(1, N, 2))[-1]]), range(N))


@case("a batch in place of the next", "batch 3 of rank 0 and batch 4 of rank 0 hold the same samples")
def _(packed: Path) -> None:
    batches = cut(range(N))
    once([*batches[:4], batches[3], *batches[5:]], range(N))


@case("every sample twice, as two epochs in one, only the number expected", f"{N} more than once")
def _(packed: Path) -> None:
    once(cut([*range(N), *range(N)]), N)


@case("every sample twice with other keys, only the number expected", "each sample is delivered 2 times")
def _(packed: Path) -> None:
    once(cut([f"{turn}-{number}" for turn in range(2) for number in range(N)]), N)


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()
        yield from super().__iter__()


@case("every sample twice, augmented, only the number expected", "each sample is delivered 2 times")
def _(packed: Path) -> None:
    once(Twice(Images(0.1), batch_size=B), N)


@case("every sample twice, flipped at random, only the number expected", "each sample is delivered 2 times")
def _(packed: Path) -> None:
    once(Twice(Flipped(), batch_size=B), N)


@case("every sample twice, augmented, nothing expected", "each sample is delivered 2 times")
def _(packed: Path) -> None:
    once(Twice(Images(0.1), batch_size=B))


@case("every sample twice, augmented, nothing expected, by the command", "2 times the 96 that its loader has")
def _(packed: Path) -> None:
    check_ranks([Twice(Images(0.1), batch_size=B)], ExpectedSamples())


@case("an iterable dataset with a length delivers every sample twice", "2 times the 96 that its loader has")
def _(packed: Path) -> None:
    class Sized(Shares):
        def __len__(self) -> int:
            return N

    noisy = Sized(lambda worker, of: (torch.rand(3) for _ in range(2 * N)))
    check_ranks([load(noisy)], ExpectedSamples())


@case("augmented, and one sample in place of another", "changes from epoch to epoch")
def _(packed: Path) -> None:
    once(load(Images(0.1), sampler=[*range(N - 1), 0]), N)


@case("flipped at random, and one sample in place of another", "pass key=")
def _(packed: Path) -> None:
    once(load(Flipped(), sampler=[*range(N - 1), 0]), N)


@case("an augmented stream, and one sample in place of another", "changes from epoch to epoch")
def _(packed: Path) -> None:
    numbers = [*range(N - 1), 0]
    once(load(Shares(lambda worker, of: (torch.rand(3) + number for number in numbers))), N)


@case("a generator of augmented batches, read once", "could not be read twice")
def _(packed: Path) -> None:
    once((torch.rand(B, 3) for _ in range(N // B)), N)


@case("a sampler with replacement", "the sampler (RandomSampler) samples with replacement")
def _(packed: Path) -> None:
    torch.manual_seed(0)
    dataset: Any = range(N)
    once(load(dataset, sampler=RandomSampler(dataset, replacement=True)), range(N))


@case("a weighted sampler with replacement", "the sampler (WeightedRandomSampler) samples with replacement")
def _(packed: Path) -> None:
    torch.manual_seed(0)
    once(load(range(N), sampler=WeightedRandomSampler([1.0] * N, N)), N)


@case("indices chosen by random.choices", "sampled with replacement")
def _(packed: Path) -> None:
    once(cut(random.Random(0).choices(range(N), k=N)), range(N))


@case("a sampler with fewer indices than samples", "has 50 indices, but the dataset has 96 samples")
def _(packed: Path) -> None:
    dataset: Any = range(N)
    once(load(dataset, sampler=RandomSampler(dataset, num_samples=50)))


@case("a retry that delivers the sample again", "1 more than once")
def _(packed: Path) -> None:
    once(cut([*range(50), 49, *range(50, N)]), range(N))


@case("a bad sample replaced by its neighbour", "1 more than once, 1 never")
def _(packed: Path) -> None:
    once(cut([number - (number == 40) for number in range(N)]), range(N))


@case("a cache that answers with the sample before", "1 more than once, 1 never")
def _(packed: Path) -> None:
    once(cut([max(number - 1, 0) for number in range(N)]), range(N))


@case("datasets end to end that share ten samples", "10 more than once")
def _(packed: Path) -> None:
    parts: list[Any] = [list(range(50)), list(range(40, N))]
    once(load(ConcatDataset(parts)), range(N))


@case("one dataset twice in a chain", "96 more than once")
def _(packed: Path) -> None:
    dataset = Shares(lambda worker, of: range(worker, N, of))
    once(load(ChainDataset([dataset, dataset])), range(N))


# Samples that are lost.


@case("the last batch is lost", "the last 8 of 96 samples are missing")
def _(packed: Path) -> None:
    once(cut(range(N))[:-1], range(N))


@case("a batch in the middle is lost", "8 never")
def _(packed: Path) -> None:
    once([*cut(range(N))[:5], *cut(range(N))[6:]], range(N))


@case("each batch loses its first sample", "12 never")
def _(packed: Path) -> None:
    once([batch[1:] for batch in cut(range(N))], range(N))


@case("drop_last", "the last 4 of 100 samples are missing: drop_last")
def _(packed: Path) -> None:
    once(load(range(100), drop_last=True), range(100))


@case("drop_last in each worker", "10 of 90 samples are missing: drop_last", slow=True)
def _(packed: Path) -> None:
    once(load(Shares(lambda worker, of: range(worker, 90, of)), num_workers=2, drop_last=True), range(90))


@case("shards that do not divide by the workers", "whole shards", slow=True)
def _(packed: Path) -> None:
    def share(worker: int, of: int) -> Iterator[int]:
        return (shard * 10 + row for shard in range(worker, 10 // of * of, of) for row in range(10))

    once(load(Shares(share), num_workers=4), range(100))


@case("a shuffle buffer that drops its remaining samples", "16 never")
def _(packed: Path) -> None:
    once(cut(random.Random(0).sample(range(N), N)[:-16]), range(N))


@case("no batches at all", "no samples arrived: the iterator is exhausted")
def _(packed: Path) -> None:
    once([])


@case("no batches in the second epoch: the iterator is used up", "no samples arrived: the iterator is exhausted")
def _(packed: Path) -> None:
    once(iter(cut(range(N))), epochs=2)


@case("a stream over an iterator that is used up, nothing expected", "no samples arrived: the iterator is exhausted")
def _(packed: Path) -> None:
    nothing = iter([0][1:])
    once(load(Shares(lambda worker, of: nothing)))


@case("augmented only in workers, and one sample in place of another", "changes from epoch to epoch", slow=True)
def _(packed: Path) -> None:
    class InWorkers(Images):
        def __getitem__(self, number: int) -> torch.Tensor:
            return super().__getitem__(number) + (0.0 if get_worker_info() is None else torch.rand(1))

    once(load(InWorkers(), num_workers=2, sampler=[*range(N - 1), 0]), N)


@case("only the number expected, and one too few", "1 never")
def _(packed: Path) -> None:
    once(cut(range(N - 1)), N)
