"""The bounds of epoch numbers, and the warning for epochs without batches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset, StateError
from shardio.order import EpochCounter


def test_every_set_epoch_refuses_an_epoch_beyond_the_limit(packed: Path) -> None:
    sampled = ShardMapDataset(packed)
    loader = DataLoader(ShardDataset(packed))
    plain = torch.utils.data.DataLoader(sampled, sampler=EpochSampler(sampled))
    owners: list[Any] = [
        EpochCounter(),
        ShardDataset(packed),
        sampled,
        EpochSampler(sampled),
        loader,
        DataLoader(sampled),
    ]
    for owner in (*owners, DevicePrefetcher(loader, "cpu"), DevicePrefetcher(plain, "cpu")):
        owner.set_epoch(2**62 - 1)
        for epoch in (2**62, 10**20):
            with pytest.raises(ValueError, match=r"epoch must be at least 0 and below 2\*\*62"):
                owner.set_epoch(epoch)
    assert len(list(loader)) == len(list(loader))  # The epoch after the last one that can be set works, too.
    state = {**loader.state_dict(), "epoch": 10**20}
    with pytest.raises(StateError, match=r"epoch .* below 2\*\*62, got 1"):
        loader.load_state_dict(state)


def test_epochs_without_batches_are_warned_of_once(packed: Path) -> None:
    """The dataset has 21 samples."""
    mapped = ShardMapDataset(packed)
    dropping: list[dict[str, Any]] = [
        {"dataset": ShardDataset(packed)},
        {"dataset": mapped, "sampler": EpochSampler(mapped)},
        {"dataset": mapped},
        {"dataset": mapped, "worker_init_fn": print},
    ]
    for options in dropping:
        loader = DataLoader(batch_size=22, drop_last=True, **options)
        with pytest.warns(
            RuntimeWarning, match=r"no batches: the 21 samples do not fill a batch on every rank .22 samples"
        ) as warned:
            assert list(loader) == []
        assert warned[0].filename == __file__
        assert list(loader) == []  # Warnings are errors in these tests.
    shares = [ShardDataset(packed, remainder="keep", rank=rank, world_size=22) for rank in (0, 21)]
    assert len(list(DataLoader(shares[0]))) == 1
    with pytest.warns(RuntimeWarning, match="no batches: rank 21 of 22 gets none of the 21 samples: use fewer ranks"):
        assert list(DataLoader(shares[1])) == []


def test_the_rest_of_an_epoch_may_have_no_batches(packed: Path) -> None:
    loader = DataLoader(ShardDataset(packed), batch_size=20, drop_last=True)
    batches = iter(loader)
    next(batches)
    state = {**loader.state_dict(), "position": 20}
    loader.load_state_dict(state)
    assert list(loader) == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_continues_where_the_loader_is(packed: Path, duplicate: Callable[[Any], Any]) -> None:
    dataset = ShardDataset(packed, fields="key", shuffle=True)
    loader = DataLoader(dataset, batch_size=4)
    dataset.set_epoch(3)
    for _ in range(2):
        list(loader)
    copied = duplicate(loader)
    assert copied.state_dict() == loader.state_dict()
    assert list(copied) == list(loader)
    assert (copied.state_dict()["epoch"], loader.state_dict()["epoch"]) == (5, 5)
    copied.dataset.set_epoch(9)
    list(copied)
    assert copied.state_dict()["epoch"] == 9


def test_a_copy_of_a_dataset_keeps_the_epoch_that_was_set(packed: Path) -> None:
    dataset = ShardDataset(packed, fields="key", shuffle=True)
    dataset.set_epoch(3)
    for copied in (copy.copy(dataset), copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        loader = DataLoader(copied, batch_size=4)
        list(loader)
        assert loader.state_dict()["epoch"] == 3
