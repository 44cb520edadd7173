"""Every part of a loader that needs the epoch receives it once, regardless of which part of shardio sets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data as torch_data
from torch.utils.data import DataLoader as TorchLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset
from shardio.check.ranks import run_rank
from shardio.epochs import set_epoch

NUM_SAMPLES = 12


class Recording:
    """A mixin that records the epochs passed to ``set_epoch``."""

    def __init__(self, epochs: list[int]) -> None:
        self.epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Indices(Recording, torch_data.Dataset[int]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


class IndexStream(Recording, torch_data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


class Renamed(torch_data.IterableDataset[Any]):
    """A user-defined wrapper that stores the dataset under a different name from the one that torch's wrappers use."""

    def __init__(self, inner: torch_data.IterableDataset[Any]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class RecordingSampler(torch_data.DistributedSampler[Any]):
    """A DistributedSampler for one rank that records the epochs passed to ``set_epoch``."""

    def __init__(self, epochs: list[int]) -> None:
        super().__init__(range(NUM_SAMPLES), num_replicas=1, rank=0)  # type: ignore[arg-type]  # a range is a dataset
        self.epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.epochs.append(epoch)


class Wrapper:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def batch_sampler(epochs: list[int]) -> Any:
    return torch_data.BatchSampler(RecordingSampler(epochs), 4, drop_last=False)


PARTS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "sampler": lambda epochs: {"dataset": range(12), "sampler": RecordingSampler(epochs)},
    "batch sampler": lambda epochs: {"dataset": range(12), "batch_sampler": batch_sampler(epochs)},
    "dataset": lambda epochs: {"dataset": Indices(epochs)},
    "Subset": lambda epochs: {"dataset": torch_data.Subset(Indices(epochs), range(12))},
    "ConcatDataset": lambda epochs: {"dataset": torch_data.ConcatDataset([Indices(epochs)] * 2)},
    "StackDataset": lambda epochs: {"dataset": torch_data.StackDataset(a=Indices(epochs))},
    "stream": lambda epochs: {"dataset": IndexStream(epochs)},
    "ChainDataset": lambda epochs: {"dataset": torch_data.ChainDataset([IndexStream(epochs)])},
    "wrapped streams": lambda epochs: {"dataset": Renamed(torch_data.ChainDataset([Renamed(IndexStream(epochs))]))},
}
LOADERS: dict[str, Callable[..., Any]] = {
    "torch": TorchLoader,
    "shardio": DataLoader,
    "torchdata": StatefulDataLoader,
    "a wrapper": lambda **parts: Wrapper(TorchLoader(**parts)),
    "a prefetcher": lambda **parts: DevicePrefetcher(Wrapper(DataLoader(**parts)), "cpu"),
}


loader_under_test: Any = None


def build_loader() -> Any:
    """Return the loader under test, as a script for ``shardio check`` does."""
    return loader_under_test


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(
    ("caller", "loader"),
    [
        *(("set_epoch", loader) for loader in LOADERS),
        ("shardio.DataLoader", "shardio"),
        ("DevicePrefetcher", "torch"),
        ("shardio check", "a prefetcher"),
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata triggers this.
def test_each_part_of_a_loader_gets_the_epoch_once(
    parts: str, caller: str, loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    epochs: list[int] = []
    made = LOADERS[loader](**PARTS[parts](epochs))
    if caller == "set_epoch":
        set_epoch(made, 1)
    elif caller == "shardio check":
        monkeypatch.setattr(f"{__name__}.loader_under_test", made)
        run_rank("tests.test_epochs:build_loader", str(tmp_path), 2, None)
    else:
        (made if caller == "shardio.DataLoader" else DevicePrefetcher(made, "cpu")).set_epoch(1)
    assert epochs == ([0, 1] if caller == "shardio check" else [1])


@pytest.mark.parametrize("make", [TorchLoader, DataLoader])
def test_samplers_and_datasets_get_the_epoch_together(make: Any) -> None:
    for sampler in (RecordingSampler([]), EpochSampler(range(NUM_SAMPLES))):
        dataset = Indices([])
        set_epoch(make(torch_data.Subset(dataset, range(NUM_SAMPLES)), 4, sampler=sampler), 5)
        assert (sampler.epoch, dataset.epochs) == (5, [5])


def make_shards(packed: Path, epoch: int = 0) -> ShardDataset:
    dataset = ShardDataset(packed, fields="key", shuffle=True)
    dataset.set_epoch(epoch)
    return dataset


@pytest.mark.parametrize("wrap", [Renamed, lambda dataset: torch_data.ChainDataset([Renamed(dataset), dataset])])
@pytest.mark.parametrize("make", [TorchLoader, DataLoader])
def test_a_wrapped_shard_dataset_delivers_the_order_of_the_epoch(packed: Path, wrap: Any, make: Any) -> None:
    wrapped = wrap(make_shards(packed))
    set_epoch(make(wrapped), 3)
    assert next(iter(TorchLoader(wrapped, 21))) == list(make_shards(packed, 3))


def test_a_loader_leaves_the_epoch_of_a_shared_map_style_dataset_alone(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    DataLoader(torch_data.Subset(dataset, range(12)), 4, sampler=RecordingSampler([])).set_epoch(5)
    assert dataset.map_epoch.known is None
    dataset.set_epoch(1, seed=7)
    set_epoch(TorchLoader(dataset), 2)
    assert dataset.map_epoch.known == (7, 2)


def test_a_framework_can_set_the_epoch_of_a_loaders_sampler(packed: Path) -> None:
    """With reload_dataloaders_every_n_epochs, Lightning creates a loader per epoch and sets its sampler's epoch."""
    epochs = []
    for epoch in range(3):
        loader = DataLoader(make_shards(packed), batch_size=4, num_workers=0)
        sampler: Any = loader.sampler
        sampler.set_epoch(epoch)
        epochs.append(list(loader))
    loader = DataLoader(make_shards(packed), batch_size=4)
    assert epochs == [list(loader) for _ in range(3)]
    assert loader.state_dict()["epoch"] == 2
