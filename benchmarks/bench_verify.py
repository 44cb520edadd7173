"""What does comparing samples with the index cost? ``python -m benchmarks.bench_verify PACKED``.

CPU time of an image from a packed directory to a random crop of 224×224, in one process: with ``verify="first"``, where
every image is read for the first time, and with ``verify="off"``. The two take turns.
"""

from __future__ import annotations

import sys

from benchmarks.timing import alternate, ratios, summarise
from shardio import DataLoader, ShardDataset
from shardio.reading import Verify
from shardio.transforms import Compose, RandomHorizontalFlip, RandomResizedCrop

ROUNDS = 15


def read_epoch(source: str, verify: Verify) -> None:
    """Read all images by a dataset of their own, which has compared none of them."""
    transform = Compose([RandomResizedCrop(224), RandomHorizontalFlip()])
    for _ in DataLoader(ShardDataset(source, transform=transform, verify=verify), batch_size=64):
        pass


def main() -> None:
    """Print the CPU time of both, and by how much comparing raises it."""
    source = sys.argv[1]
    num_images = len(ShardDataset(source))
    times = alternate(
        {"first": lambda _: read_epoch(source, "first"), "off": lambda _: read_epoch(source, "off")},
        chunks=[num_images],
        rounds=ROUNDS,
    )
    for verify, rounds in times.items():
        print(f"verify={verify!r}: {summarise(rounds)} µs an image")
    print(f"ratio: {summarise(ratios(times['first'], times['off']), 3)}")


if __name__ == "__main__":
    main()
