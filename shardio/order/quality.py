"""Measure how well an order shuffles and how much the ranks read. The measures apply to any order.

An epoch is given as one array per rank: the indices (in manifest order) of the samples that the rank receives, in the
order in which it receives them. The global order takes one sample from each rank in turn, so W * B consecutive samples
are the batches of one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardio.order.epoch_order import EpochOrder
from shardio.order.split import split_whole

IDEAL_DISTANCE = 1 / 3
"""The mean distance between two random positions, as a fraction of the total length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderQuality:
    """The measures of one epoch.

    Attributes:
        displacement: See :func:`mean_displacement`; ideally 1/3.
        separation: See :func:`mean_separation`; ideally 1/3.
        same_shard: See :func:`same_shard_chance`, for the batches of all ranks together.
        ideal_same_shard: See :func:`ideal_same_shard_chance`.
        mean_open: See :func:`count_open_shards`; the mean over the samples of all ranks.
        max_open: See :func:`count_open_shards`; the maximum over all ranks.
        read_factor: See :func:`read_factor`; at least 1, and exactly 1 if no two ranks read the same shard.
    """

    displacement: float
    separation: float
    same_shard: float
    ideal_same_shard: float
    mean_open: float
    max_open: int
    read_factor: float


def measure_quality(
    ranks: Sequence[NDArray[np.int64]],
    shard_sizes: NDArray[np.int64],
    shard_bytes: NDArray[np.int64],
    global_batch_size: int,
) -> OrderQuality:
    """Measure one epoch.

    Args:
        ranks: For each rank, the samples that it reads, int64 [n], in order. Together they are a permutation of
            0 … N-1.
        shard_sizes: int64 [shards], the number of samples in each shard in manifest order.
        shard_bytes: int64 [shards], each shard's size in bytes.
        global_batch_size: The number of samples in one step of all ranks.
    """
    ranks = [samples for samples in ranks if len(samples)]
    order = take_turns(ranks)
    shards_of_ranks = [shards_of(samples, shard_sizes) for samples in ranks]
    num_open = [count_open_shards(shards) for shards in shards_of_ranks]
    return OrderQuality(
        displacement=mean_displacement(order),
        separation=mean_separation(order, shard_sizes),
        same_shard=same_shard_chance(shards_of(order, shard_sizes), global_batch_size),
        ideal_same_shard=ideal_same_shard_chance(shard_sizes),
        mean_open=float(np.average([mean for mean, _ in num_open], weights=[len(samples) for samples in ranks])),
        max_open=max(most for _, most in num_open),
        read_factor=read_factor(shards_of_ranks, shard_sizes, shard_bytes),
    )


def divide_among_ranks(order: EpochOrder, world_size: int, batch_size: int) -> list[NDArray[np.int64]]:
    """Return the samples of an epoch that each rank reads, int64 [n] for each rank. Each sample occurs exactly once."""
    ranks = []
    for rank in range(world_size):
        split = split_whole(order, rank=rank, world_size=world_size, batch_size=batch_size)
        batches = split.batches(range(split.num_batches))
        ranks.append(order.samples_at(np.concatenate([np.empty(0, np.int64), *batches])))
    return ranks


def take_turns(ranks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the global order: the first sample of each rank, the second of each, …; int64 [N]."""
    turns = np.concatenate([np.arange(len(samples)) for samples in ranks])
    return np.concatenate(ranks)[np.argsort(turns, kind="stable")]


def shards_of(samples: NDArray[np.int64], shard_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the shard of each sample, int64 [n]."""
    return np.searchsorted(np.cumsum(shard_sizes), samples, side="right").astype(np.int64)


def mean_displacement(order: NDArray[np.int64]) -> float:
    """Return the mean distance of samples from their places in manifest order, abs(position - sample) / N.

    The mean is 0 for an unshuffled order, and about 1/3 (exactly (1 - 1/N**2) / 3 on average) for a global shuffle.
    Moving whole shards is enough to reach 1/3, so this measure does not show whether samples of a shard are separated.

    Args:
        order: int64 [N], the sample at each position.
    """
    return float(np.abs(np.arange(len(order)) - order).mean()) / len(order)


def mean_separation(order: NDArray[np.int64], shard_sizes: NDArray[np.int64]) -> float:
    """Return the mean of abs(p - q) / N over all pairs of neighbors in a shard, where p and q are their positions.

    The mean shows how far apart neighbors on disk are delivered; neighbors may belong to the same class or video. It is
    1 / N for shards read in sequence, about 1/3 for a global shuffle, and NaN if no shard has two samples.

    Args:
        order: int64 [N], the sample at each position.
        shard_sizes: int64 [shards].
    """
    positions = np.empty(len(order), dtype=np.int64)
    positions[order] = np.arange(len(order))
    distances = np.abs(np.diff(positions))
    is_within = np.ones(len(order), dtype=np.bool_)
    # Each stop is the first sample of the next shard. Empty shards repeat a stop; the last stop, N, becomes 0.
    is_within[np.cumsum(shard_sizes) % len(order)] = False
    within = distances[is_within[1:]]
    return float(within.mean()) / len(order) if len(within) else float("nan")


def same_shard_chance(shards: NDArray[np.int64], batch_size: int) -> float:
    """Return the probability that two random samples of one batch come from the same shard.

    For a batch of n samples, c of them from shard s, the probability is the sum over s of c (c - 1) / (n (n - 1)). The
    result is the mean over all batches of at least two samples, or NaN if there are none.

    Args:
        shards: int64 [n], the shard of the sample at each position. Batches are consecutive slices of this array.
        batch_size: The number of samples in a batch; the last batch may be smaller.
    """
    num_shards = int(shards.max(initial=0)) + 1
    cells, counts = np.unique(np.arange(len(shards)) // batch_size * num_shards + shards, return_counts=True)
    sizes = np.bincount(np.arange(len(shards)) // batch_size)
    pairs = np.bincount(cells // num_shards, weights=counts * (counts - 1), minlength=len(sizes))
    is_pair = sizes > 1
    chances = pairs[is_pair] / (sizes[is_pair] * (sizes[is_pair] - 1))
    return float(chances.mean()) if len(chances) else float("nan")


def ideal_same_shard_chance(shard_sizes: NDArray[np.int64]) -> float:
    """Return :func:`same_shard_chance` for the whole dataset as one batch: the sum of n (n - 1) / (N (N - 1))."""
    sizes, total = shard_sizes.astype(np.float64), float(shard_sizes.sum())
    return float((sizes * (sizes - 1)).sum() / (total * (total - 1))) if total > 1 else float("nan")


def count_open_shards(shards: NDArray[np.int64]) -> tuple[float, int]:
    """Return the number of shards that one rank has open at the same time: the mean and the maximum over its samples.

    A shard is open from the first to the last of its samples that the rank reads, inclusive. So the maximum is the
    number of shards that a rank must keep, as open files or in a cache, to fetch each shard only once.

    Args:
        shards: int64 [n], the shard of each sample that the rank reads, in order; n >= 1.
    """
    num = len(shards)
    first = np.unique(shards, return_index=True)[1]
    stop = num - np.unique(shards[::-1], return_index=True)[1]
    change = np.bincount(first, minlength=num + 1) - np.bincount(stop, minlength=num + 1)
    num_open = np.cumsum(change[:num])
    return float(num_open.mean()), int(num_open.max())


def read_factor(
    shards_of_ranks: Sequence[NDArray[np.int64]], shard_sizes: NDArray[np.int64], shard_bytes: NDArray[np.int64]
) -> float:
    """Return the number of bytes that a rank reads for each byte of its samples, if it can fetch only whole shards.

    The result is the size of all shards from which a rank reads in the epoch, divided by the size of the rank's
    samples. A sample's size is taken to be the average size in its shard. Both sizes are summed over all ranks.

    Args:
        shards_of_ranks: For each rank, the shard of each sample that it reads, int64 [n].
        shard_sizes: int64 [shards], the number of samples in each shard.
        shard_bytes: int64 [shards], each shard's size in bytes.
    """
    sample_bytes = shard_bytes / np.maximum(shard_sizes, 1)
    read = sum(float(shard_bytes[np.unique(shards)].sum()) for shards in shards_of_ranks)
    return read / sum(float(sample_bytes[shards].sum()) for shards in shards_of_ranks)
