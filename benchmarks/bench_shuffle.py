"""Measure how well an order mixes samples, and how much data each rank reads.

``python -m benchmarks.bench_shuffle`` measures one epoch of each dataset, in shardio's default order, in a global
shuffle, with different windows and strata, and with WebDataset's shard shuffle and buffer. The measures (see
shardio/order/quality.py) are exact over all samples and ranks. No data is read; every machine gives the same figures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import webdataset
from numpy.typing import NDArray

from shardio.order import EpochOrder, OrderQuality, choose_settings, divide_among_ranks, measure_quality
from shardio.values import count

HEADER = """\
| order | moved by | neighbors apart | same shard, × ideal | shards open, mean (max) | bytes read, × share |
|---|---|---|---|---|---|"""

Choice = tuple[int | None, int | None]
"""Window and strata; None means the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A dataset with shards of equal size, its readers, and orders to measure besides the default and global orders."""

    num_shards: int
    shard_size: int
    world_size: int
    batch_size: int
    num_workers: int
    choices: Sequence[Choice]

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.full(self.num_shards, self.shard_size, dtype=np.int64)

    @property
    def num_samples(self) -> int:
        return self.num_shards * self.shard_size

    def __str__(self) -> str:
        return (
            f"{self.num_shards:,} shards of {self.shard_size:,} samples, {count(self.world_size, 'rank')}, "
            f"batches of {self.batch_size}, with {count(self.num_workers, 'worker')} per rank in WebDataset"
        )


CASES = (
    Case(num_shards=12, shard_size=500, world_size=2, batch_size=64, num_workers=2, choices=[(1000, None)]),
    Case(
        num_shards=1281,
        shard_size=1000,
        world_size=1,
        batch_size=256,
        num_workers=4,
        choices=[(16_384, None), (262_144, None)],
    ),
    Case(
        num_shards=1281,
        shard_size=1000,
        world_size=8,
        batch_size=256,
        num_workers=4,
        choices=[(16_384, None), (262_144, None), (131_072, 1)],
    ),
    Case(
        num_shards=5000,
        shard_size=1000,
        world_size=64,
        batch_size=256,
        num_workers=4,
        choices=[(262_144, None), (131_072, 1)],
    ),
    Case(
        num_shards=5000,
        shard_size=1000,
        world_size=1024,
        batch_size=64,
        num_workers=1,
        choices=[(262_144, None)],
    ),
)
BUFFERS = (1000, 10_000)


def measure_shardio(case: Case, window: int | None, strata: int | None) -> tuple[str, OrderQuality]:
    """Return the settings that shardio chose, and the measures of its order."""
    settings = choose_settings(case.sizes, shuffle=True, seed=0, window=window, strata=strata)
    ranks = divide_among_ranks(EpochOrder(case.sizes, settings, epoch=0), case.world_size, case.batch_size)
    name = f"{settings.window:,} in {settings.strata:,}"
    return name, measure_quality(ranks, case.sizes, case.sizes, case.world_size * case.batch_size)


def measure_webdataset(case: Case, buffer: int) -> OrderQuality:
    """Return the measures of ``WebDataset(shards, shardshuffle=all, nodesplitter=split_by_node).shuffle(buffer)``."""
    ranks = [
        np.fromiter(chain.from_iterable(_webdataset_rank(case, rank, buffer)), dtype=np.int64)
        for rank in range(case.world_size)
    ]
    return measure_quality(ranks, case.sizes, case.sizes, case.world_size * case.batch_size)


def _webdataset_rank(case: Case, rank: int, buffer: int) -> Iterator[list[int]]:
    """Yield a rank's batches in the order of torch's DataLoader: one from each worker in turn, until all have ended."""
    workers = [_webdataset_worker(case, rank, worker, buffer) for worker in range(case.num_workers)]
    while workers:
        batches = [list(islice(worker, case.batch_size)) for worker in workers]
        yield from filter(None, batches)
        workers = [worker for worker, batch in zip(workers, batches, strict=True) if batch]


def _webdataset_worker(case: Case, rank: int, worker: int, buffer: int) -> Iterator[int]:
    """Yield the samples of one worker in WebDataset's own order, after the splits by node and by worker."""
    shards = range(case.num_shards)[rank :: case.world_size][worker :: case.num_workers]
    shuffle = webdataset.filters._shuffle
    rng = random.Random(rank * case.num_workers + worker)
    mixed: Iterator[int] = shuffle(iter(shards), bufsize=case.num_shards, initial=case.num_shards, rng=rng)
    samples = chain.from_iterable(range(shard * case.shard_size, (shard + 1) * case.shard_size) for shard in mixed)
    result: Iterator[int] = shuffle(samples, bufsize=buffer, rng=rng)
    return result


def _row(name: str, quality: OrderQuality) -> str:
    same = quality.same_shard / quality.ideal_same_shard
    return (
        f"| {name} | {quality.displacement:.3f} | {quality.separation:.4f} | {same:.1f} | "
        f"{quality.mean_open:.1f} ({quality.max_open}) | {quality.read_factor:.2f} |"
    )


def main() -> None:
    """Print the tables."""
    for case in CASES:
        print(f"{case}\n\n{HEADER}")
        name, quality = measure_shardio(case, None, None)
        print(_row(f"**default, {name}**", quality))
        print(_row("global, N in 1", measure_shardio(case, case.num_samples, 1)[1]))
        for window, strata in case.choices:
            print(_row(*measure_shardio(case, window, strata)))
        for buffer in BUFFERS:
            print(_row(f"WebDataset, buffer {buffer:,}", measure_webdataset(case, buffer)), flush=True)
        print()


if __name__ == "__main__":
    main()
