"""Loaders that decode in threads of the training process: batches are not transferred, but all threads share the GIL.

Each task is a whole batch: OpenCV releases the GIL while it works, but passing single images between threads would need
the GIL.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from benchmarks.loaders.crops import Use, make_batch, resize, use_one_thread, use_opencv, use_simplejpeg
from benchmarks.loaders.files import list_files
from benchmarks.loaders.job import TARGET, Batch, Epochs, Job, Repeated

Load = Callable[[Sequence[int]], Batch]
"""A function that makes a batch of the samples with the given indices."""


def make_nodes(job: Job) -> Epochs:
    """Return torchdata's nodes with OpenCV."""
    return _make_nodes(job, _load_files(job, use_opencv))


def make_nodes_simplejpeg(job: Job) -> Epochs:
    """Return torchdata's nodes with simplejpeg."""
    return _make_nodes(job, _load_files(job, use_simplejpeg))


def make_nodes_raw(job: Job) -> Epochs:
    """Return torchdata's nodes over pixels in a memory-mapped array."""
    return _make_nodes(job, _load_pixels(job))


def _make_nodes(job: Job, load: Load) -> Epochs:
    """Return a batch sampler, threads that make the batches, and a prefetch queue."""
    nodes: Any = importlib.import_module("torchdata.nodes")
    node = nodes.SamplerWrapper(_make_sampler(job))
    node = nodes.ParallelMapper(node, load, num_workers=job.num_workers, method="thread")
    return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2), restart_on_stop_iteration=True)  # type: ignore[no-any-return]


def make_spdl(job: Job) -> Epochs:
    """Return SPDL's pipeline: a source of batch indices, and one stage with a thread per worker."""
    pipeline: Any = importlib.import_module("spdl.pipeline")
    sampler, load = _make_sampler(job), _load_files(job, use_opencv)

    def iterate() -> Iterator[Batch]:
        builder = pipeline.PipelineBuilder().add_source(sampler)
        builder = builder.pipe(load, concurrency=job.num_workers, output_order="input").add_sink(3)
        built = builder.build(num_threads=job.num_workers, use_thread_output_queue=True)
        with built.auto_stop():
            yield from built.get_iterator()

    return Repeated(iterate)


def _make_sampler(job: Job) -> BatchSampler:
    return BatchSampler(RandomSampler(range(job.num_samples)), job.batch_size, drop_last=False)


def _load_files(job: Job, use: Use) -> Load:
    use_one_thread()
    files = list_files(job.data)

    def load(indices: Sequence[int]) -> Batch:
        contents = [Path(files[index][0]).read_bytes() for index in indices]
        labels = np.array([files[index][1] for index in indices])
        return torch.from_numpy(make_batch(contents, job.crop, use)), torch.from_numpy(labels)

    return load


def _load_pixels(job: Job) -> Load:
    use_one_thread()
    pixels, places = np.load(job.data / "pixels.npy", mmap_mode="r"), np.load(job.data / "places.npy")

    def load(indices: Sequence[int]) -> Batch:
        images = np.empty((len(indices), TARGET, TARGET, 3), np.uint8)
        for (start, height, width), row in zip(places[indices, :3].tolist(), images, strict=True):
            resize(pixels[start : start + 3 * height * width].reshape(height, width, 3), job.crop, row)
        return torch.from_numpy(images), torch.from_numpy(places[indices, 3])

    return load
