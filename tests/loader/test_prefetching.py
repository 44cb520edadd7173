"""The number of batches made ahead: the user's, or enough for all workers."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardio import DataLoader, ShardMapDataset
from shardio.loader.processes import pool as pool_module
from tests.buffers import buffers_of, make_loader


@pytest.fixture(autouse=True)
def _one_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all threads into one worker process, which starts sooner than two."""
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: [num_threads])


def count_buffers(loader: DataLoader) -> int:
    """Return how many buffers an epoch takes: those of the batches made ahead, and of the next batch.

    If anything else in this process forks, the loader replaces the buffer that the user holds. So count in two epochs.
    """
    return min(len(buffers_of(loader)) for _ in range(2))


def test_small_batches_are_made_ahead_until_each_worker_has_two_chunks(pictures: Path) -> None:
    assert count_buffers(make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=None)) == 16 + 1
    assert count_buffers(make_loader(pictures, num_workers=2, batch_size=2, prefetch_factor=None)) == 4 + 1
    assert count_buffers(make_loader(pictures, num_workers=1, batch_size=16, prefetch_factor=None)) == 2 + 1


@pytest.mark.parametrize("prefetch", [1, 5])
def test_prefetch_factor_is_the_number_of_batches_made_ahead(pictures: Path, prefetch: int) -> None:
    loader = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=prefetch)
    assert loader.prefetch_factor == prefetch
    assert count_buffers(loader) == prefetch + 1


def test_a_prefetch_factor_that_is_set_later_applies(pictures: Path) -> None:
    loader = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=None, persistent_workers=True)
    assert count_buffers(loader) == 16 + 1
    loader.prefetch_factor = 2
    assert count_buffers(loader) == 2 + 1
    loader.prefetch_factor = None
    assert count_buffers(loader) == 16 + 1


def test_a_loader_re_created_from_attributes_keeps_the_default(pictures: Path) -> None:
    loader = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=None)
    assert loader.prefetch_factor == 2, "as in torch"
    again = make_loader(pictures, num_workers=8, batch_size=2, prefetch_factor=loader.prefetch_factor)
    assert count_buffers(again) == 16 + 1
    assert count_buffers(pickle.loads(pickle.dumps(loader))) == 16 + 1


def test_torchs_workers_have_torchs_default(pictures: Path) -> None:
    dataset = ShardMapDataset(pictures, fields="key")
    loader = DataLoader(dataset, batch_size=8, num_workers=1, worker_init_fn=lambda worker_id: None)
    assert loader.calls_dataset
    assert loader.prefetch_factor == 2
    assert len(list(loader)) == 13
