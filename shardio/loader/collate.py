"""From samples to a batch: torch's default, but images lie in memory as they were decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, default_collate, get_worker_info

from shardio.datasets import ImageFolder, ShardDataset, ShardMapDataset
from shardio.datasets.bad_samples import Broken, Skipped, all_skipped
from shardio.decoding import find_wide
from shardio.interruptions import let_through, no_end
from shardio.loader.maker import describe_failure
from shardio.loader.messages import Failed


def yields_images(dataset: Any) -> bool:
    """Say whether a dataset is shardio's, or torch's Subset or ConcatDataset of such."""
    if isinstance(dataset, Subset):
        return yields_images(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(yields_images, dataset.datasets))
    return isinstance(dataset, ShardDataset | ShardMapDataset | ImageFolder)


def collate_channels_last(samples: Sequence[Any]) -> Any:
    """Collate samples as torch does; uint8 images become one [N, 3, H, W] tensor in channels_last memory.

    Args:
        samples: Tuples of values, or bare values.

    Returns:
        A list of batches, one for each place of the tuples, or one batch.

    Raises:
        ValueError: If images differ in size.
    """
    if isinstance(samples[0], tuple):
        return [collate_column(column) for column in zip(*samples, strict=True)]
    return collate_column(samples)


@dataclass(frozen=True, slots=True)
class CollateKept:
    """Collate the samples that were not left out. What cannot be made comes as Failed.

    An error that torch's loader saw would say neither which batch it was nor, from a worker process, its attributes.

    Attributes:
        collate: The user's function, or the default.
        is_batched: Whether that gets a list of samples, and not a single one.
    """

    collate: Callable[[Any], Any]
    is_batched: bool

    def __call__(self, samples: Any) -> Any:
        try:
            return self.collate(_keep(samples) if self.is_batched else _keep([samples])[0])
        except Exception as error:
            let_through(error)
            failure = no_end(error)
            if get_worker_info() is None:
                return Failed(serial=0, error=failure, traceback=None)
            return describe_failure(0, failure)


@dataclass(frozen=True, slots=True)
class CollateEndless:
    """Collate as the user's function does; raise RuntimeError where that raises StopIteration.

    Attributes:
        collate: The function.
    """

    collate: Callable[[Any], Any]

    def __call__(self, samples: Any) -> Any:
        try:
            return self.collate(samples)
        except StopIteration as error:
            raise no_end(error) from error


@contextmanager
def endless_collate(loader: Any) -> Iterator[None]:
    """Make torch's iterators that are created in the block collate by CollateEndless."""
    users = loader.collate_fn
    loader.collate_fn = CollateEndless(users)
    try:
        yield
    finally:
        loader.collate_fn = users


def _keep(samples: Sequence[Any]) -> list[Any]:
    """Return the samples that were not left out; raise the error of the first that is broken."""
    for sample in samples:
        if isinstance(sample, Broken):
            raise sample.error
    kept = [sample for sample in samples if not isinstance(sample, Skipped)]
    if not kept:
        raise all_skipped([sample.key for sample in samples])
    return kept


def collate_column(values: Sequence[Any]) -> Any:
    """Collate the values of one field, as :func:`collate_channels_last` does."""
    first = values[0]
    if not (isinstance(first, torch.Tensor) and first.dtype == torch.uint8 and first.ndim == 3 and first.shape[0] == 3):
        return _collate_default(values)
    sizes = sorted({tuple(image.shape[1:]) for image in values})
    if len(sizes) > 1:
        raise ValueError(
            f"the images of a batch differ in size, {sizes[0]} and {sizes[1]} among others: give the dataset a "
            "transform that makes them alike, such as RandomResizedCrop(224)"
        )
    # [3, H, W] views of [H, W, 3] memory: stacked as they lie, and seen as [N, 3, H, W].
    # By numpy: torch.stack starts threads for it, which take turns where several workers run.
    return torch.from_numpy(np.stack([image.permute(1, 2, 0).numpy() for image in values])).permute(0, 3, 1, 2)


def _collate_default(values: Sequence[Any]) -> Any:
    try:
        return default_collate(list(values))
    except Exception as error:
        for place, value in enumerate(values):
            if (wide := find_wide(value)) is not None:
                raise ValueError(
                    f"sample {place} of a batch has the integer {wide}, of more than 64 bits, which no tensor holds: "
                    "write it as a string, or give a collate_fn that makes no tensor of it"
                ) from error
        raise
