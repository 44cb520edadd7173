"""Loaders for tars: WebDataset, and Megatron Energon, which is built on it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.loaders.crops import make_batch, use_one_thread, use_opencv
from benchmarks.loaders.job import Batch, Crop, Epochs, Job

BUFFER_SIZE = 1000
"""The size of a worker's shuffle buffer, in samples."""


def make_webdataset(job: Job) -> Epochs:
    """Return WebDataset's loader: workers make whole batches, and WebLoader passes them on."""
    return _make_webdataset(job, partial(collate_images, crop=job.crop), ("jpg", "cls"), shuffle=True)


def make_small_sequential(job: Job) -> Epochs:
    """Return WebDataset's loader, which reads in sequential order."""
    return _make_webdataset(job, collate_small, ("bin",), shuffle=False)


def make_small_shuffled(job: Job) -> Epochs:
    """Return WebDataset's loader with its shuffle buffer."""
    return _make_webdataset(job, collate_small, ("bin",), shuffle=True)


def collate_images(samples: Sequence[tuple[bytes, bytes]], *, crop: Crop) -> Batch:
    """Make a batch from undecoded (JPEG, label) pairs, as stored in the tar."""
    images = make_batch([content for content, _ in samples], crop, use_opencv)
    return torch.from_numpy(images), torch.tensor([int(label) for _, label in samples])


def collate_small(samples: Sequence[tuple[bytes]]) -> list[bytes]:
    """Make a batch of bytes objects."""
    return [content for (content,) in samples]


def make_energon(job: Job) -> Epochs:
    """Return Energon's loader for training, which decodes and makes batches in its workers."""
    energon: Any = importlib.import_module("megatron.energon")

    class Encoder(energon.DefaultTaskEncoder):  # type: ignore[misc]  # without types
        def batch(self, samples: list[Any]) -> Batch:
            use_one_thread()
            return collate_images([(sample.image, sample.label) for sample in samples], crop=job.crop)

    dataset = energon.get_train_dataset(
        job.data,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=job.num_workers),
        batch_size=job.batch_size,
        shuffle_buffer_size=BUFFER_SIZE,
        max_samples_per_sequence=BUFFER_SIZE,
        task_encoder=Encoder(),
        repeat=False,
        auto_decode=False,
    )
    return energon.get_loader(dataset, prefetch_factor=4, watchdog_timeout_seconds=None)  # type: ignore[no-any-return]


def _make_webdataset(job: Job, collate: Any, fields: tuple[str, ...], *, shuffle: bool) -> Epochs:
    wds: Any = importlib.import_module("webdataset")
    shards = sorted(map(str, job.data.glob("*.tar")))
    dataset = wds.WebDataset(shards, shardshuffle=len(shards) if shuffle else False, seed=0)
    if shuffle:
        dataset = dataset.shuffle(BUFFER_SIZE)
    dataset = dataset.to_tuple(*fields).batched(job.batch_size, collation_fn=collate, partial=True)
    return wds.WebLoader(  # type: ignore[no-any-return]
        dataset,
        batch_size=None,
        num_workers=job.num_workers,
        worker_init_fn=use_one_thread,
        persistent_workers=job.is_persistent,
        prefetch_factor=4,
    )
