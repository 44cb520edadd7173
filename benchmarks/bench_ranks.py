"""Estimate what one of many ranks reads from a bucket: requests, bytes and open shards, without reading data.

``python -m benchmarks.bench_ranks``: datasets in shardio's default order, on 1 to 1,024 ranks. The requests are those
that shardio plans for whole windows of some ranks in the middle of an epoch, assuming that all samples of a shard have
the same size. Peers fetch whole shards. A second table counts the shards that the peers' nodes fetch, as the peers' own
code divides them among ranks and workers in the first epoch. Every machine gives the same figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from benchmarks.loaders.peers_streaming import import_streaming
from shardio.libraries import import_torchvision
from shardio.order import EpochOrder, choose_settings, shards_of, split_whole
from shardio.reading import estimate_traffic
from shardio.shards import Ints
from shardio.shards.index import AHEAD
from shardio.storage.remote import MAX_WHOLE

WORLD_SIZES = (1, 2, 3, 5, 8, 16, 24, 40, 64, 96, 100, 128, 256, 333, 512, 1000, 1024)

NODE = 8
"""The number of ranks on a node; they share a cache."""

ENTRY_BYTES = 68
"""The number of bytes that an index takes for a sample with two fields and a 12-byte key."""

NUM_WORKERS = 2
"""The number of workers that a peer has on each rank."""

NUM_WINDOWS = 4
"""The number of windows to read on each rank, in addition to parts of the windows before and after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """A dataset of equal shards, and the batch size of each rank."""

    num_shards: int
    shard_samples: int
    sample_bytes: int
    batch_size: int


DATASETS = (
    Dataset(num_shards=1_281, shard_samples=1_000, sample_bytes=110_000, batch_size=64),
    Dataset(num_shards=1_281, shard_samples=1_000, sample_bytes=110_000, batch_size=256),
    Dataset(num_shards=10_000, shard_samples=10_000, sample_bytes=25_600, batch_size=64),
    Dataset(num_shards=10_000, shard_samples=100_000, sample_bytes=2_560, batch_size=64),
)


def measure(dataset: Dataset, world_size: int) -> str:
    """Return a row of a table: the means over three ranks."""
    sizes = np.full(dataset.num_shards, dataset.shard_samples)
    settings = choose_settings(sizes, shuffle=True, seed=0)
    order = EpochOrder(sizes, settings, 0)
    window, step_size = settings.window, world_size * dataset.batch_size
    begin = max(0, order.num_samples - NUM_WINDOWS * window) // 2
    steps = range(begin // step_size, (begin + NUM_WINDOWS * window) // step_size + 1)
    num_samples = num_requests = num_bytes = 0
    shards_per_window = []

    def find_positions(rank: int) -> Ints:
        split = split_whole(order, rank=rank, world_size=world_size, batch_size=dataset.batch_size)
        return np.concatenate(split.batches(steps))

    for rank in {0, world_size // 3, world_size - 1}:
        positions = find_positions(rank)
        # shardio plans one or more whole windows at a time.
        for own in np.split(positions, np.flatnonzero(np.diff(positions // window)) + 1)[1:-1]:
            indices = order.samples_at(own)
            requests, fetched = estimate_traffic(indices, sizes, sizes * dataset.sample_bytes)
            num_samples, num_requests, num_bytes = num_samples + len(own), num_requests + requests, num_bytes + fetched
            shards_per_window.append(len(np.unique(shards_of(indices, sizes))))
    share = num_bytes / (num_samples * dataset.sample_bytes)
    node = np.sort(np.concatenate([find_positions(rank) for rank in range(min(world_size, NODE))]))
    indices = order.samples_at(node[node // window == -(-begin // window)])
    index_share = count_index_bytes(indices, dataset) / (len(indices) * dataset.sample_bytes)
    return (
        f"| {world_size:,} | {num_requests / num_samples:.4f} | {num_bytes / num_requests / 2**20:.2f} | {share:.3f} | "
        f"{np.mean(shards_per_window):.1f} | {100 * index_share:.2f} % |"
    )


def count_index_bytes(indices: Ints, dataset: Dataset) -> int:
    """Return the number of index bytes that a node with an empty cache fetches for its samples of a window."""
    shards, inner = np.divmod(indices, dataset.shard_samples)
    if ENTRY_BYTES * dataset.shard_samples <= MAX_WHOLE:
        return len(np.unique(shards)) * ENTRY_BYTES * dataset.shard_samples
    groups = shards * dataset.shard_samples + inner // AHEAD * AHEAD
    return len(np.unique(groups)) * ENTRY_BYTES * AHEAD


def count_mosaic(dataset: Dataset, world_size: int) -> int:
    """Return the number of shards that the nodes of MosaicML Streaming fetch, with its default settings."""
    import_streaming()
    partition: Any = import_module("streaming.base.partition")
    shuffle: Any = import_module("streaming.base.shuffle")
    num_nodes, num_ranks = -(-world_size // NODE), min(world_size, NODE)
    num_samples, sizes = dataset.num_shards * dataset.shard_samples, np.full(dataset.num_shards, dataset.shard_samples)
    parts = partition.get_partitions(
        "relaxed", num_samples, num_nodes, num_nodes, num_ranks, NUM_WORKERS, dataset.batch_size
    )
    shards = shuffle.get_shuffle("py1e", sizes, num_nodes, 9176, 0) // dataset.shard_samples
    return sum(len(np.unique(shards[node[node >= 0]])) for node in parts)


def count_litdata(dataset: Dataset, world_size: int) -> int:
    """Return the number of chunks that the nodes fetch with LitData."""
    import_torchvision()  # LitData imports torchvision, whose compiled part may not match torch.
    shuffle: Any = import_module("litdata.utilities.shuffle")
    environment: Any = import_module("litdata.utilities.env")._DistributedEnv(world_size, 0, -(-world_size // NODE))
    interval: Any = import_module("litdata.streaming.item_loader").Interval
    begins = [shard * dataset.shard_samples for shard in range(dataset.num_shards)]
    intervals = [
        interval(begin, begin, begin + dataset.shard_samples, begin + dataset.shard_samples) for begin in begins
    ]
    order = np.random.default_rng(0).permutation(dataset.num_shards)
    chunks, _ = shuffle._associate_chunks_and_intervals_to_workers(
        environment, order, intervals, True, NUM_WORKERS, dataset.batch_size
    )
    step = NODE * NUM_WORKERS
    return sum(len(set().union(*chunks[first : first + step])) for first in range(0, len(chunks), step))


def print_peers(dataset: Dataset) -> None:
    """Print how many shards the nodes of each peer fetch, and how unequal the shares of WebDataset's ranks are."""
    print(
        f"Peers with {NUM_WORKERS} workers per rank: requests per sample, and the bytes of the dataset that they read\n"
    )
    print("| ranks | MosaicML | LitData | WebDataset | the samples of WebDataset's ranks, × their share |")
    print("|---|---|---|---|---|")
    for world_size in [world_size for world_size in WORLD_SIZES if world_size == 1 or world_size % NODE == 0]:
        cells = []
        for fetched in (count_mosaic(dataset, world_size), count_litdata(dataset, world_size), dataset.num_shards):
            times = fetched / dataset.num_shards
            cells.append(f"{times / dataset.shard_samples:.4f}, {times:.2f}")
        share = dataset.num_shards / world_size
        fewest, most = int(share) / share, -(-dataset.num_shards // world_size) / share
        print(f"| {world_size:,} | {' | '.join(cells)} | {fewest:.2f} to {most:.2f} |", flush=True)
    print()


def main() -> None:
    """Print the tables."""
    print_peers(DATASETS[0])
    for dataset in DATASETS:
        sizes = np.full(dataset.num_shards, dataset.shard_samples)
        settings = choose_settings(sizes, shuffle=True, seed=0)
        print(
            f"{dataset.num_shards:,} shards of {dataset.shard_samples:,} samples of {dataset.sample_bytes:,} bytes, "
            f"batches of {dataset.batch_size}: windows of {settings.window:,} samples in {settings.strata:,} strata\n"
        )
        print(
            "| ranks | requests per sample | MiB per request | bytes read, × share | shards of a rank in a window | "
            "indexes that a node reads, as a share of its samples' bytes |"
        )
        print("|---|---|---|---|---|---|")
        for world_size in WORLD_SIZES:
            print(measure(dataset, world_size), flush=True)
        print()


if __name__ == "__main__":
    main()
