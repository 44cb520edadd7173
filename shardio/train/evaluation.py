"""The evaluation of a model over all ranks: exact, or with a warning that samples count twice."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from shardio.device import DevicePrefetcher
from shardio.device.generators import BatchTransform
from shardio.train.config import TrainConfig
from shardio.train.meters import Score
from shardio.train.ranks import joined_ranks, share_buffers, use_device
from shardio.train.step import DTYPES, autocast
from shardio.world import World


def evaluate(model: nn.Module, loader: Iterable[Any], config: TrainConfig) -> Score:
    """Evaluate a model on the batches of all ranks. Every rank must call this.

    The model does not change. Images are neither mixed nor erased, and labels are not smoothed,
    whatever the settings. The score is exact if the loader yields each sample once, or marks
    repeats with False in a last field, bool [N], as shardio's loaders do with
    ``remainder="mask"``. If the loader pads without marks, a RuntimeWarning is issued.

    Args:
        model: A module on the device that maps images to outputs [N, classes].
        loader: An iterable of batches that start with images and labels.
        config: The settings: device, precision, and how images are normalised.

    Returns:
        The score over all ranks.

    Raises:
        ValueError: If there are no samples.
    """
    device = use_device(config.device)
    with joined_ranks(device) as world:
        warn_of_repeats(loader, world, stacklevel=2)
        batches = loader if isinstance(loader, DevicePrefetcher) else prefetch(loader, config, device)
        return measure(model, batches, config)


def measure(model: nn.Module, batches: DevicePrefetcher, config: TrainConfig) -> Score:
    """Evaluate a model as :func:`evaluate` does, on ranks that have already joined."""
    was_training = model.training
    model.eval()
    score = Score(batches.device)
    with torch.no_grad():
        share_buffers(model)
        for batch in batches:
            images, labels = images_and_labels(batch)
            with autocast(batches.device, config.precision):
                outputs = model(images)
                losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
            last = batch[-1]
            is_mask = isinstance(last, torch.Tensor) and last.dtype == torch.bool
            score.add(losses, outputs, labels, last if is_mask else None)
        score = score.over_ranks()
    model.train(was_training)
    if not score.num_images:
        raise ValueError("there is nothing to evaluate: the loader yielded no samples, or marked all as repeats")
    return score


def prefetch(
    loader: Iterable[Any], config: TrainConfig, device: torch.device, transforms: Sequence[BatchTransform] = ()
) -> DevicePrefetcher:
    """Return a loader whose images arrive on the device, normalised, in the dtype that the model computes in.

    Then the transforms are applied to each batch.
    """
    return DevicePrefetcher(
        loader,
        device,
        normalize=(config.mean, config.std),
        dtype=DTYPES[config.precision],
        channels_last=config.channels_last,
        transform=transforms,
    )


def images_and_labels(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first two fields of a batch."""
    fields = batch if isinstance(batch, (tuple, list)) else ()
    if len(fields) < 2 or not all(isinstance(field, torch.Tensor) for field in fields[:2]):
        names = ", ".join(type(field).__name__ for field in fields)
        found = type(batch).__name__ + (f" of {names}" if names else "")
        raise TypeError(f"batches must start with a tensor of images and one of labels, got {found}")
    return fields[0], fields[1]


def warn_of_repeats(loader: Any, world: World, *, stacklevel: int) -> None:
    """Warn, on rank 0, if a validation loader repeats samples without marks.

    Args:
        loader: The loader, which may be in wrappers such as DevicePrefetcher.
        world: The rank and the world size.
        stacklevel: The caller that the warning names, as in ``warnings.warn``.
    """
    if world.rank != 0:
        return
    while not hasattr(loader, "dataset") and hasattr(loader, "loader"):
        loader = loader.loader
    num_samples, num_ranks, padded_by = _find_padding(loader)
    if num_samples % num_ranks:
        warnings.warn(
            f"the score on {num_samples} validation samples is not exact, because {padded_by} repeats "
            f"{-num_samples % num_ranks} of them so that all {num_ranks} ranks have the same number. Use "
            "shardio.DataLoader, and pass remainder='mask' to the ShardDataset, or to sampler=EpochSampler(dataset, "
            "shuffle=False)",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def _find_padding(loader: Any) -> tuple[int, int, str]:
    """Return the numbers of samples and ranks, and what pads; 0, 1 and "" without padding."""
    dataset: Any = getattr(loader, "dataset", None)
    sampler: Any = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):  # EpochSampler is one.
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for order in (dataset, sampler):
        policy = getattr(order, "remainder", None)
        if policy == "pad" and not getattr(loader, "drop_last", False):
            return order.num_all_samples, order.world().world_size, f"{type(order).__name__} with remainder='pad'"
        if policy is not None:
            return 0, 1, ""
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        return len(dataset), sampler.num_replicas, type(sampler).__name__
    return 0, 1, ""
