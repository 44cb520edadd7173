"""The statistics of the loader."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from shardio import DataLoader, EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
from shardio.loader.processes import fork_server
from shardio.transforms import RandomResizedCrop


def identity(image: Any) -> Any:
    return image


@pytest.mark.parametrize("num_workers", [0, 1])
def test_times_and_counts_are_those_of_the_last_epoch(packed: Path, num_workers: int) -> None:
    dataset = ShardDataset(packed, transform=RandomResizedCrop(48))
    loader = DataLoader(dataset, batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0)
    before = loader.stats()
    assert (before.num_batches, before.num_samples, before.first_batch_s) == (0, 0, None)
    for _ in range(2):
        list(loader)
        stats = loader.stats()
        assert (stats.num_batches, stats.num_samples, stats.num_workers) == (6, 21, num_workers)
        assert stats.first_batch_s is not None
        assert 0 < stats.first_batch_s <= stats.elapsed_s
        assert 0 < stats.wait_for_data_s <= stats.elapsed_s
        assert min(stats.read_s, stats.transform_s, stats.decode_s) > 0
        # Stages are parts of the threads' time; they do not work between iterations.
        assert stats.read_s + stats.transform_s + stats.decode_s <= max(num_workers, 1) * stats.elapsed_s
        assert (stats.idle_s > 0) == (num_workers > 0)
        assert stats.samples_per_s == pytest.approx(21 / stats.elapsed_s)
    list(islice(loader, 2))
    assert loader.stats().num_samples == 8


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_method": "thread"}], ids=str)
def test_where_the_dataset_makes_the_samples_all_time_is_its_own(packed: Path, workers: dict[str, Any]) -> None:
    sampled = ShardMapDataset(packed)
    for loader, name, num_batches in (
        (DataLoader(TensorDataset(torch.zeros(21)), batch_size=4, **workers), "TensorDataset", 6),
        (DataLoader(ShardDataset(packed), batch_size=4, worker_init_fn=identity, **workers), "ShardDataset", 6),
        (DataLoader(sampled, 4, sampler=EpochSampler(sampled), worker_init_fn=identity, **workers), "Shard", 6),
        (DataLoader(ShardDataset(packed), batch_size=None, **workers), "ShardDataset", 21),
    ):
        for num_epochs in range(2):
            assert loader.stats().num_batches == num_batches * num_epochs
            list(islice(loader, 2))
            assert loader.stats().num_batches == 2
            list(loader)
        stats = loader.stats()
        assert (stats.num_batches, stats.num_samples) == (num_batches, 21)
        assert stats.num_workers == workers.get("num_workers", 0)
        assert 0 < stats.transform_s == stats.python_s <= max(stats.num_workers, 1) * stats.elapsed_s
        assert stats.read_s == stats.decode_s == 0
        assert (stats.idle_s > 0) == (stats.num_workers > 0)
        assert name in stats.in_python[0] or name == "Shard"


def test_torchs_datapipes_have_no_statistics_and_the_error_names_the_reason() -> None:
    pipe = IterableWrapper(range(5))
    with pytest.raises(TypeError, match="own code does not read these samples: the dataset is a"):
        DataLoader(pipe).stats()


def test_persistent_workers_count_no_idle_time_before_an_epoch_begins(packed: Path) -> None:
    dataset = ShardDataset(packed, transform=RandomResizedCrop(48))
    loader = DataLoader(dataset, batch_size=4, num_workers=3, persistent_workers=True)
    list(loader)
    time.sleep(0.5)  # Longer than an epoch takes: this is what must not be counted.
    list(loader)
    stats = loader.stats()
    assert 0 < stats.idle_s <= 3 * stats.elapsed_s


def test_the_time_to_start_worker_processes_counts(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = fork_server._start_process

    def start_slowly(*arguments: Any) -> Any:
        time.sleep(0.5)  # This is what must be counted.
        return start(*arguments)

    monkeypatch.setattr(fork_server, "_start_process", start_slowly)
    loader = DataLoader(ShardDataset(packed, transform=RandomResizedCrop(48)), batch_size=4, num_workers=1)
    list(loader)
    stats = loader.stats()
    assert stats.first_batch_s is not None
    assert 0.5 <= stats.first_batch_s <= stats.elapsed_s


def test_an_image_folder_takes_the_fast_path(images: Path) -> None:
    folder = ImageFolder(images, transform=RandomResizedCrop(48))
    loader = DataLoader(folder, batch_size=4, sampler=EpochSampler(folder), num_workers=1)
    list(loader)
    assert loader.stats().num_samples == 21
