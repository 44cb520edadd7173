"""Iterations over one rank's share: they never end early in silence, and other datasets may wrap them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from shardio import ShardDataset
from shardio.reading import SampleReader


def test_an_interrupted_iteration_does_not_end_silently(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = ShardDataset(packed, fields="key", batch_size=4)
    iterator = iter(dataset)
    first = list(islice(iterator, 3))

    def interrupt(*_: object) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SampleReader, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"this epoch ended before its last batch \(KeyboardInterrupt\)"):
            next(iterator)
    dataset.set_epoch(0)
    assert list(islice(iter(dataset), 3)) == first


class Clips(IterableDataset[str]):
    """A user's dataset that passes its rank to the ShardDataset inside it."""

    def __init__(self, packed: Path, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas = rank, num_replicas
        self.num_processes, self.process_index = num_replicas, rank
        self.inner = ShardDataset(packed, fields="key", rank=rank, world_size=num_replicas, remainder="keep")

    def __iter__(self) -> Iterator[str]:
        yield from self.inner


def test_a_dataset_that_passes_on_its_rank_splits_once(packed: Path) -> None:
    keys = [key for rank in range(2) for key in DataLoader(Clips(packed, rank, 2), batch_size=None)]
    assert len(keys) == 21
    assert set(keys) == set(ShardDataset(packed, fields="key", rank=0, world_size=1))
