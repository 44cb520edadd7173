"""Measure what comparing samples with the index costs: ``python -m benchmarks.bench_verify PACKED``.

The benchmark measures the CPU time of reading an image from a packed directory, with ``verify="first"`` (every image is
read for the first time) and with ``verify="off"``. The output also shows the difference as a share of the time that an
image takes from reading to a random 224×224 crop. The candidates take turns in one process.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.timing import alternate, summarize
from shardio import DataLoader, ShardDataset
from shardio.reading import SampleReader, Verify
from shardio.shards import open_table
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

ROUNDS, AT_ONCE = 15, 16


def read_all(source: str, verify: Verify) -> None:
    """Read the images with a new reader, which has not yet compared any of them with the index."""
    table = open_table(source)
    reader = SampleReader(table, verify)
    for numbers in np.array_split(np.arange(table.manifest.num_samples), table.manifest.num_samples // AT_ONCE):
        reader.read(numbers, ("jpg", "cls"))
    reader.close()


def load_all(source: str) -> None:
    """Load the images as training would, without comparing them with the index."""
    transform = Compose([RandomResizedCrop(224), RandomHorizontalFlip()])
    for _ in DataLoader(ShardDataset(source, transform=transform, verify="off"), batch_size=64):
        pass


def main() -> None:
    """Print the CPU times, and the share of them that comparing takes."""
    source = sys.argv[1]
    times = alternate(
        {
            "reading, verify='first'": lambda _: read_all(source, "first"),
            "reading, verify='off'": lambda _: read_all(source, "off"),
            "loading, verify='off'": lambda _: load_all(source),
        },
        chunks=[len(ShardDataset(source))],
        rounds=ROUNDS,
    )
    for name, rounds in times.items():
        print(f"{name}: {summarize(rounds, 1)} µs per image")
    shares = [100 * (first - off) / whole for first, off, whole in zip(*times.values(), strict=True)]
    print(f"comparing: {summarize(shares, 1)} % of loading")


if __name__ == "__main__":
    main()
