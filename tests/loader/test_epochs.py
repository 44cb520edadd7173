"""Which epochs there are: bounded numbers, and a word where one has no batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset, StateError
from shardio.order import EpochCounter


def test_an_epoch_beyond_all_training_is_refused_by_whoever_is_told(packed: Path) -> None:
    sampled = ShardMapDataset(packed)
    loader = DataLoader(ShardDataset(packed))
    plain = torch.utils.data.DataLoader(sampled, sampler=EpochSampler(sampled))
    told = [EpochCounter(), ShardDataset(packed), sampled, EpochSampler(sampled), loader, DataLoader(sampled)]
    for owner in (*told, DevicePrefetcher(loader, "cpu"), DevicePrefetcher(plain, "cpu")):
        owner.set_epoch(2**62 - 1)
        for epoch in (2**62, 10**20):
            with pytest.raises(ValueError, match=r"epoch must be at least 0 and below 2\*\*62"):
                owner.set_epoch(epoch)
    assert len(list(loader)) == len(list(loader))  # The epoch after the last that can be named comes, too.
    state = {**loader.state_dict(), "epoch": 10**20}
    with pytest.raises(StateError, match=r"epoch .* below 2\*\*62, got 1"):
        loader.load_state_dict(state)
