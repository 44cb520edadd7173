"""Evaluation is exact over several ranks, or a warning says that samples count twice."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data as torchs
from torch import nn

import shardio
from shardio.train import TrainConfig, evaluate, small_resnet, train
from shardio.train.step import warn_of_repeats
from shardio.transforms import CenterCrop
from shardio.world import World
from tests.train.runs import make_config, make_loader, make_model
from tests.train.small_data import PLAIN, join, make_batches, make_linear, weights_of

RANK = World(rank=0, world_size=2)
REPEATS = (
    r"on 21 validation samples is not exact, because .* repeats 1 of them so that all 2 ranks have the same number\. "
    r".*remainder='mask'"
)


def _config() -> TrainConfig:
    options: dict[str, Any] = {"epochs": 1, "precision": "fp32", "device": "cpu", "lr": 0.01, **PLAIN}
    return TrainConfig(**options)


def test_each_sample_counts_once() -> None:
    model, batches = make_linear(), make_batches([5, 5, 1])
    images, labels = join(batches)
    outputs = model(images.float() / 255)
    score = evaluate(model, batches, _config())
    assert score.num_images == 11
    assert score.loss == pytest.approx(nn.functional.cross_entropy(outputs, labels).item(), abs=1e-6)
    assert score.accuracy == pytest.approx(float((outputs.argmax(1) == labels).double().mean()))


def test_samples_that_are_marked_as_repeated_do_not_count() -> None:
    model, (images, labels) = make_linear(), make_batches([6])[0]
    valid = torch.tensor([True, True, False, True, False, True])
    score = evaluate(model, [(images, labels, valid)], _config())
    expected = evaluate(model, [(images[valid], labels[valid])], _config())
    assert score.num_images == 4
    assert score.accuracy == expected.accuracy
    assert score.loss == pytest.approx(expected.loss, abs=1e-7)


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_does_not_change_the_model(mode: bool) -> None:
    """Neither its weights and BatchNorm statistics, nor its mode. So a second evaluation gives the same score."""
    model, batches = small_resnet(3, 16, width=8).train(mode), make_batches([6, 5], side=16)
    before = weights_of(model)
    first, second = evaluate(model, batches, _config()), evaluate(model, batches, _config())
    assert (first.loss, first.accuracy) == (second.loss, second.accuracy)
    for one, other in zip(before, weights_of(model), strict=True):
        assert torch.equal(one, other)
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())
    assert all(module.training == mode for module in model.modules())


def make_shards(packed: Path, remainder: Any) -> shardio.ShardDataset:
    """Make the dataset of one of two ranks."""
    return shardio.ShardDataset(packed, transform=CenterCrop(16), remainder=remainder, rank=0, world_size=2)


def share(num_samples: int = 21, **options: Any) -> Any:
    """Return torch's sampler of one of two ranks."""
    return torchs.DistributedSampler(range(num_samples), num_replicas=2, rank=0, **options)  # type: ignore[arg-type]  # a range is a dataset


def sample(remainder: Any) -> shardio.EpochSampler:
    """Return shardio's sampler of one of two ranks."""
    return shardio.EpochSampler(range(21), remainder=remainder, rank=0, world_size=2)


def test_a_loader_that_repeats_samples_causes_a_warning(packed: Path) -> None:
    shards = make_shards(packed, "pad")
    for loader in (
        shardio.DataLoader(shards, 4),
        torchs.DataLoader(shards, 4),
        shardio.DataLoader(range(21), 4, sampler=sample("pad")),
        torchs.DataLoader(range(21), 4, sampler=share()),  # type: ignore[arg-type]  # a range is a dataset
        torchs.DataLoader(range(21), batch_sampler=torchs.BatchSampler(share(), 4, drop_last=False)),  # type: ignore[arg-type]  # as above
        shardio.DevicePrefetcher(shardio.DataLoader(shards, 4), "cpu"),
    ):
        with pytest.warns(RuntimeWarning, match=REPEATS):
            warn_of_repeats(loader, RANK, stacklevel=1)


def test_other_loaders_cause_no_warning(packed: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loader in (
            *(shardio.DataLoader(make_shards(packed, remainder), 4) for remainder in ("mask", "keep", "drop")),
            shardio.DataLoader(make_shards(packed, "pad"), 4, drop_last=True),
            shardio.DataLoader(shardio.ShardDataset(packed), 4),
            *(shardio.DataLoader(range(21), 4, sampler=sample(remainder)) for remainder in ("mask", "keep", "drop")),
            shardio.DataLoader(range(21), 4),
            torchs.DataLoader(range(22), 4, sampler=share(22)),  # type: ignore[arg-type]  # a range is a dataset
            torchs.DataLoader(range(21), 4, sampler=share(drop_last=True)),  # type: ignore[arg-type]  # as above
            [],
        ):
            warn_of_repeats(loader, RANK, stacklevel=1)
        padded = shardio.DataLoader(make_shards(packed, "pad"), 4)
        warn_of_repeats(padded, World(rank=1, world_size=2), stacklevel=1)  # Rank 0 warns for all.
    assert caught == []


def test_training_and_evaluation_warn_at_the_users_line(packed: Path, tmp_path: Path) -> None:
    model, config = make_model(), make_config(tmp_path, epochs=2)
    padded = shardio.DataLoader(make_shards(packed, "pad"), 4)
    with pytest.warns(RuntimeWarning, match=REPEATS) as caught:
        train(model, make_loader(packed), config, val_loader=padded)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(RuntimeWarning, match=REPEATS) as caught:
        evaluate(model, padded, config)
    assert [warning.filename for warning in caught] == [__file__]
    masked = shardio.DataLoader(make_shards(packed, "mask"), 4)
    assert evaluate(model, masked, config).num_images == 11
