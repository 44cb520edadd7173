"""What fetches a loader's batches has to know of its arguments: the same in processes, threads and the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import _DatasetKind

from shardio.bad_samples import BadSamples

WorkerMethod = Literal["multiprocessing", "thread"]
"""What workers are. The names are those of torch's ``WorkerInfo.worker_method``."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchJob:
    """What every worker of a loader needs.

    Attributes:
        dataset: The user's dataset.
        is_iterable: Whether it is an IterableDataset.
        is_batched: Whether the loader makes batches, instead of single samples.
        batch_size: The samples in a full batch of an iterable dataset.
        drop_last: Whether an iterable dataset's last batch is left out if it is not full.
        collate_fn: Makes a batch of samples or, without batches, converts one sample.
        worker_init_fn: Called by each worker before its first batch.
        num_workers: How many workers there are; 0 if the calling process fetches.
        bad_samples: The policy for samples of a map-style dataset that raise errors; None raises them.
    """

    dataset: Any
    is_iterable: bool
    is_batched: bool
    batch_size: int | None
    drop_last: bool
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    bad_samples: BadSamples | None = None


def is_iterable(loader: Any) -> bool:
    """Return whether a loader iterates over its dataset, instead of reading it by index."""
    return bool(loader._dataset_kind == _DatasetKind.Iterable)  # Subclasses may set it.


def make_failing_job(error: Exception) -> FetchJob:
    """Return a job whose workers answer every request with an error."""

    def fail(_: object) -> None:
        raise error

    return FetchJob(
        dataset=None,
        is_iterable=False,
        is_batched=False,
        batch_size=None,
        drop_last=False,
        collate_fn=fail,
        worker_init_fn=fail,
        num_workers=1,
    )
