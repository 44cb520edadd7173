"""Validation over several ranks: exact, or a warning says that samples count twice."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data as torchs

import shardio
from shardio.train import evaluate, train
from shardio.train.repeats import warn_of_repeats
from shardio.transforms import CenterCrop
from shardio.world import World
from tests.train.runs import make_config, make_loader, make_model

RANK = World(rank=0, world_size=2)
REPEATS = r"on 21 validation samples is not exact: .* repeats 1 of them.*2 ranks.*count twice.*remainder='mask'"


def make_shards(packed: Path, remainder: Any) -> shardio.ShardDataset:
    """Make one of two ranks' dataset."""
    return shardio.ShardDataset(packed, transform=CenterCrop(16), remainder=remainder, rank=0, world_size=2)


def share(number: int = 21, **options: Any) -> Any:
    return torchs.DistributedSampler(range(number), num_replicas=2, rank=0, **options)  # type: ignore[arg-type]  # a range is a dataset


def sample(remainder: Any) -> shardio.EpochSampler:
    return shardio.EpochSampler(range(21), remainder=remainder, rank=0, world_size=2)


def test_a_loader_that_pads_is_warned_of(packed: Path) -> None:
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


def test_a_loader_that_repeats_nothing_unmarked_is_not(packed: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
        warn_of_repeats(padded, World(rank=1, world_size=2), stacklevel=1)  # Rank 0 says it for all.


def test_training_and_evaluating_warn(packed: Path, tmp_path: Path) -> None:
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
