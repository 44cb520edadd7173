"""Whatever shuffles by epoch within a loader is told the epoch, by whichever part of shardio tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data as torchs
from torch.utils.data import DataLoader as TorchLoader

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset
from shardio.check.processes import run_rank
from shardio.epochs import tell_epoch

drawn: list[int] = []
"""The numbers of samples in the order in which they were drawn from ``Numbers``."""


class Numbers(torchs.Dataset[int]):
    """Samples that are their numbers, and an epoch that somebody may tell."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        drawn.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Renamed(torchs.IterableDataset[Any]):
    """Somebody's wrapper, with a name of its own for what it wraps."""

    def __init__(self, inner: torchs.IterableDataset[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class OwnLoader:
    """Somebody's loader around another one."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def make_shards(packed: Path) -> ShardDataset:
    return ShardDataset(packed, fields="key", shuffle=True)


def share(dataset: Any) -> torchs.DistributedSampler[Any]:
    return torchs.DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)


def make_batched() -> TorchLoader[Any]:
    """Make a loader that cannot be told the epoch but by its batch sampler's sampler."""
    return TorchLoader(range(12), batch_sampler=torchs.BatchSampler(share(range(12)), 4, drop_last=False))  # type: ignore[arg-type]  # a range is a dataset


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda dataset: dataset,
    "ChainDataset": lambda dataset: torchs.ChainDataset([Renamed(dataset), dataset]),
    "a wrapper": Renamed,
    "wrappers": lambda dataset: Renamed(torchs.ChainDataset([Renamed(dataset)])),
}
TELLERS: dict[str, Callable[[Any, int], None]] = {
    "shardio's loader": lambda dataset, epoch: DataLoader(dataset, 4).set_epoch(epoch),
    "DevicePrefetcher": lambda dataset, epoch: DevicePrefetcher(TorchLoader(dataset), "cpu").set_epoch(epoch),
    "both": lambda dataset, epoch: DevicePrefetcher(OwnLoader(DataLoader(dataset)), "cpu").set_epoch(epoch),
    "tell_epoch": lambda dataset, epoch: tell_epoch(OwnLoader(TorchLoader(dataset)), epoch),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("tell", TELLERS.values(), ids=TELLERS)
def test_a_shard_dataset_is_found_in_whatever_wraps_it(packed: Path, wrap: Any, tell: Any) -> None:
    dataset, expected = make_shards(packed), make_shards(packed)
    expected.set_epoch(3)
    wrapped = wrap(dataset)
    if wrapped is dataset and tell in (TELLERS["shardio's loader"], TELLERS["both"]):
        loader = DataLoader(dataset, 21)  # Its loaders are in epochs of their own.
        tell_epoch(loader, 3)
        assert next(iter(loader)) == list(expected)
    else:
        tell(wrapped, 3)
        assert next(iter(TorchLoader(wrapped, 21))) == list(expected)


def test_samplers_and_datasets_are_told_once_each() -> None:
    numbers = Numbers()
    joined: Any = torchs.ConcatDataset([torchs.Subset(numbers, range(12)), numbers])
    tellers: list[Callable[[Any], None]] = [
        lambda sampler: tell_epoch(TorchLoader(joined, 4, sampler=sampler), 5),
        lambda sampler: DataLoader(joined, 4, sampler=sampler).set_epoch(5),
        lambda sampler: DataLoader(torchs.StackDataset(a=joined), 4, sampler=sampler).set_epoch(5),
    ]
    for tell in tellers:
        for sampler in (share(joined), EpochSampler(joined)):
            tell(sampler)
            assert sampler.epoch == 5
            assert numbers.told == [5]
            numbers.told.clear()
    loader = make_batched()
    tell_epoch(loader, 5)
    assert loader.batch_sampler.sampler.epoch == 5  # type: ignore[union-attr]  # it has one


def test_a_loader_of_shardios_leaves_the_epoch_of_shared_map_style_datasets_alone(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    DataLoader(torchs.Subset(dataset, range(4)), 4, sampler=share(range(4))).set_epoch(5)
    assert dataset.map_epoch.known is None
    dataset.set_epoch(1, seed=7)
    tell_epoch(TorchLoader(dataset), 2)
    assert dataset.map_epoch.known == (7, 2)


def make_checked() -> TorchLoader[int]:
    numbers = Numbers()
    return TorchLoader(numbers, batch_sampler=torchs.BatchSampler(share(numbers), 4, drop_last=False))


def test_the_checker_tells_the_sampler_of_a_batch_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    drawn.clear()
    run_rank("tests.test_epochs:make_checked", str(tmp_path), 2, None)
    first, second = drawn[-24:-12], drawn[-12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_frameworks_that_tell_samplers_alone_tell_a_loader_of_a_shard_dataset(packed: Path) -> None:
    """Lightning's reload_dataloaders_every_n_epochs makes a loader for each epoch, and tells its sampler."""
    epochs = []
    for epoch in range(3):
        loader = DataLoader(make_shards(packed), batch_size=4, num_workers=0)
        sampler: Any = loader.sampler
        sampler.set_epoch(epoch)
        epochs.append(list(loader))
    loader = DataLoader(make_shards(packed), batch_size=4)
    assert epochs == [list(loader) for _ in range(3)]
    assert loader.state_dict()["epoch"] == 2
