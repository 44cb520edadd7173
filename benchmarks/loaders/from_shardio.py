"""shardio's loaders, and its decoder without a loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

import shardio
from benchmarks.loaders.job import TARGET, Batch, Epochs, Job, Repeated
from shardio.transforms import CenterCrop, Compose, RandomHorizontalFlip, RandomResizedCrop, Resize


def make_shards(job: Job, decoded_cache: str | None = None) -> Epochs:
    """Return a shuffled shardio loader over shards."""
    dataset = shardio.ShardDataset(job.data, shuffle=True, transform=_make_transform(job), decoded_cache=decoded_cache)
    return shardio.DataLoader(
        dataset, batch_size=job.batch_size, num_workers=job.num_workers, persistent_workers=job.is_persistent
    )


def make_cached(job: Job) -> Epochs:
    """Return shardio's loader over shards, with decoded images kept in memory."""
    return make_shards(job, decoded_cache="4GB")


def make_folder(job: Job) -> Epochs:
    """Return a shuffled shardio loader over a directory of class folders."""
    dataset = shardio.ImageFolder(job.data, transform=_make_transform(job))
    return shardio.DataLoader(
        dataset,
        batch_size=job.batch_size,
        sampler=shardio.EpochSampler(dataset),
        num_workers=job.num_workers,
        persistent_workers=job.is_persistent,
    )


def make_small_sequential(job: Job) -> Epochs:
    """Return a shardio loader that yields bytes in sequential order."""
    return _make_small(job, shuffle=False)


def make_small_shuffled(job: Job) -> Epochs:
    """Return a shuffled shardio loader that yields bytes."""
    return _make_small(job, shuffle=True)


def make_bare(job: Job) -> Epochs:
    """Return a loop in which threads only decode bytes in memory, into buffers that are reused.

    The loop does only what a loader must do: it yields batches in order, and prepares two while the caller uses one.
    """
    from benchmarks.photographs import CHUNK_SIZE, Chunk, load_with_shardio, make_rng_keys
    from shardio.images import use_one_thread

    use_one_thread()
    samples = list(shardio.ShardDataset(job.data, fields=("jpg", "label"), decoders={"jpg": bytes}))
    contents, labels = [sample[0] for sample in samples], np.array([sample[1] for sample in samples])
    load = load_with_shardio([RandomResizedCrop(TARGET), RandomHorizontalFlip()])
    pool = ThreadPoolExecutor(job.num_workers)
    buffers = np.zeros((3, job.batch_size, TARGET, TARGET, 3), np.uint8)

    def run(number: int, start: int) -> list[Future[None]]:
        buffer, stop = buffers[number % len(buffers)], min(start + job.batch_size, len(contents))
        futures = []
        for first in range(start, stop, CHUNK_SIZE):
            part = slice(first, min(first + CHUNK_SIZE, stop))
            keys = make_rng_keys(part.stop)[first:]
            rows = buffer[first - start : part.stop - start]
            futures.append(pool.submit(load, Chunk(contents=contents[part], rng_keys=keys, tasks=[]), rows))
        return futures

    def iterate() -> Iterator[Batch]:
        starts = range(0, len(contents), job.batch_size)
        under_way: deque[list[Future[None]]] = deque()
        for number in range(len(starts) + 2):
            if number < len(starts):
                under_way.append(run(number, starts[number]))
            if number >= 2:
                for future in under_way.popleft():
                    future.result()
                start = starts[number - 2]
                taken = labels[start : start + job.batch_size]
                yield buffers[(number - 2) % len(buffers)][: len(taken)], taken

    return Repeated(iterate)


def _make_transform(job: Job) -> Compose:
    if job.crop == "train":
        return Compose([RandomResizedCrop(TARGET), RandomHorizontalFlip()])
    return Compose([Resize(256), CenterCrop(TARGET)])


def _make_small(job: Job, *, shuffle: bool) -> Epochs:
    dataset = shardio.ShardDataset(job.data, fields="bin", shuffle=shuffle)
    return shardio.DataLoader(
        dataset, batch_size=job.batch_size, num_workers=job.num_workers, persistent_workers=job.is_persistent
    )
