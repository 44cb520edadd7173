"""All of torch's workers use the same epoch, even if one begins late and another epoch is set in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from shardio import ShardDataset


def wait_for(path: Path) -> None:
    """Poll for a file that the test creates, because the worker is another process."""
    while not path.exists():
        time.sleep(0.01)


def delay(path: Path, worker_id: int) -> None:
    if worker_id == 1:
        wait_for(path)


class LateDataset(ShardDataset):
    """A dataset whose worker 1 begins the second iteration once a file exists."""

    def __init__(self, *arguments: Any, path: Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.path, self.num_iterations = path, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        self.num_iterations += 1
        if info is not None and info.id == 1 and self.num_iterations == 2:
            wait_for(self.path)
        return super().__iter__()


def epochs_of(packed: Path, num_epochs: int) -> list[list[str]]:
    """Return the batches of each epoch, as this process makes them."""
    dataset = ShardDataset(packed, fields="key", shuffle=True, batch_size=4)
    epochs = []
    for epoch in range(num_epochs):
        dataset.set_epoch(epoch)
        epochs.append(list(DataLoader(dataset, batch_size=4)))
    return epochs


@pytest.mark.parametrize("is_persistent", [False, True])
def test_an_epoch_that_is_set_while_workers_start_is_that_of_the_next_iteration(
    packed: Path, tmp_path: Path, is_persistent: bool
) -> None:
    begun = tmp_path / "begun"
    dataset = ShardDataset(packed, fields="key", shuffle=True, batch_size=4)
    loader = DataLoader(
        dataset,
        batch_size=4,
        num_workers=2,
        worker_init_fn=partial(delay, begun),
        multiprocessing_context="fork",
        persistent_workers=is_persistent,
    )
    batches = iter(loader)
    dataset.set_epoch(1)
    begun.touch()
    assert [list(batches), list(loader)] == epochs_of(packed, 2)


def test_persistent_workers_follow_the_first_of_them(packed: Path, tmp_path: Path) -> None:
    dataset = LateDataset(packed, fields="key", shuffle=True, batch_size=4, path=tmp_path / "begun")
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=True)
    epochs = [list(loader)]
    dataset.set_epoch(1)
    batches = iter(loader)
    first = next(batches)
    dataset.set_epoch(2)
    dataset.path.touch()
    epochs += [[first, *batches], list(loader)]
    assert epochs == epochs_of(packed, 3)


def test_a_loader_with_the_seed_of_an_earlier_one_has_its_own_epochs(packed: Path) -> None:
    dataset = ShardDataset(packed, fields="key", shuffle=True, batch_size=4)
    found = []
    for epoch in range(0, 4, 2):
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"multiprocessing_context": "fork", "persistent_workers": True}
        loader = DataLoader(dataset, batch_size=4, num_workers=2, generator=generator, **options)
        for number in (epoch, epoch + 1):
            dataset.set_epoch(number)
            found.append(list(loader))
    assert found == epochs_of(packed, 4)
