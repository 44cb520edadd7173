"""Loaders that decode in threads of the training process: batches are not transferred, but all threads share the GIL.

Each task is a whole batch: OpenCV releases the GIL while it works, and handing over single images would take it again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from benchmarks.loaders.crops import make_batch, use_one_thread
from benchmarks.loaders.files import list_files
from benchmarks.loaders.job import Batch, Epochs, Job, Repeated


def make_nodes(job: Job) -> Epochs:
    """Return torchdata's nodes: a batch sampler, threads that make the batches, and a prefetch queue."""
    nodes: Any = importlib.import_module("torchdata.nodes")
    node = nodes.SamplerWrapper(_make_sampler(job))
    node = nodes.ParallelMapper(node, _make_loader(job), num_workers=job.num_workers, method="thread")
    return nodes.Loader(nodes.Prefetcher(node, prefetch_factor=2), restart_on_stop_iteration=True)  # type: ignore[no-any-return]


def make_spdl(job: Job) -> Epochs:
    """Return SPDL's pipeline: a source of batch indices, and one stage with a thread per worker."""
    pipeline: Any = importlib.import_module("spdl.pipeline")
    sampler, load = _make_sampler(job), _make_loader(job)

    def iterate() -> Iterator[Batch]:
        builder = pipeline.PipelineBuilder().add_source(sampler)
        builder = builder.pipe(load, concurrency=job.num_workers, output_order="input").add_sink(3)
        built = builder.build(num_threads=job.num_workers, use_thread_output_queue=True)
        with built.auto_stop():
            yield from built.get_iterator()

    return Repeated(iterate)


def _make_sampler(job: Job) -> BatchSampler:
    return BatchSampler(RandomSampler(range(job.num_samples)), job.batch_size, drop_last=False)


def _make_loader(job: Job) -> Callable[[Sequence[int]], Batch]:
    use_one_thread()
    files = list_files(job.data)

    def load(indices: Sequence[int]) -> Batch:
        contents = [Path(files[index][0]).read_bytes() for index in indices]
        labels = np.array([files[index][1] for index in indices])
        return torch.from_numpy(make_batch(contents, job.crop)), torch.from_numpy(labels)

    return load
