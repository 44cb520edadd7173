"""The resources of buffers: memory, descriptors and processes, released with the last object that needs them."""

from __future__ import annotations

import resource
from itertools import islice
from pathlib import Path

import pytest

from shardio import DataLoader, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.buffers import (
    NUM_BUFFERS,
    assert_same,
    buffer_of,
    buffers_of,
    find_buffers,
    find_worker_processes,
    make_loader,
    make_oracle,
    wait_until,
    without_collector,
)
from tests.files import count_open_files
from tests.processes import assert_passes_in_fresh_process

pytestmark = pytest.mark.usefixtures("no_process_of_other_tests")

NUM_BATCHES = 160
"""More than a process may have descriptors in a test below."""


@pytest.fixture(autouse=True, scope="module")
def _all_is_open(pictures: Path) -> None:
    """Open what is opened only once."""
    list(make_loader(pictures))


@pytest.mark.parametrize("persistent", [False, True])
def test_memory_descriptors_and_worker_processes_end_with_the_loader(pictures: Path, persistent: bool) -> None:
    with without_collector():
        buffers, process_ids, num_files = find_buffers(), find_worker_processes(), count_open_files()
        loader = make_loader(pictures, persistent_workers=persistent)
        kept = list(loader)
        iterator = iter(loader)
        kept += islice(iterator, 3)
        assert find_worker_processes() - process_ids
        assert len(find_buffers() - buffers) >= len(kept)
        del loader, iterator
        assert find_worker_processes() <= process_ids
        assert count_open_files() == num_files
        assert find_buffers() - buffers == {buffer_of(images) for images, *_ in kept}
        oracle = make_oracle(pictures)
        assert_same(kept, [*oracle, *islice(oracle, 3)])
        kept.clear()
        assert find_buffers() <= buffers


def test_buffers_of_kept_batches_are_released(pictures: Path) -> None:
    with without_collector():
        buffers, process_ids = find_buffers(), find_worker_processes()
        loader = make_loader(pictures, persistent_workers=True)
        for _ in range(2):
            kept = list(loader)
            assert len(find_buffers() - buffers) >= len(kept)
            del kept
            buffers_of(loader)
            assert len(find_buffers() - buffers) <= NUM_BUFFERS + 1
        for process_id in find_worker_processes() - process_ids:
            wait_until(lambda process_id=process_id: len(find_buffers(process_id)) <= NUM_BUFFERS + 1)  # type: ignore[misc]  # of a default


def test_abandoned_iterators_leave_no_buffers(pictures: Path) -> None:
    with without_collector():
        buffers, process_ids = find_buffers(), find_worker_processes()
        loader = make_loader(pictures, persistent_workers=True)
        buffers_of(loader)
        mine = find_worker_processes() - process_ids
        num_files = count_open_files()
        for number in range(40):
            loader.set_epoch(number)
            iterator = iter(loader)
            for _ in range(number % 4):
                next(iterator)
            if number % 2:  # Else it ends when the next one begins.
                del iterator
        assert count_open_files() == num_files
        loader.set_epoch(3)
        oracle = make_oracle(pictures)
        oracle.set_epoch(3)
        assert_same(list(loader), list(oracle))
        buffers_of(loader)
        assert find_worker_processes() - process_ids == mine
        assert len(find_buffers() - buffers) <= NUM_BUFFERS + 1
        for process_id in mine:
            wait_until(lambda process_id=process_id: len(find_buffers(process_id)) <= NUM_BUFFERS + 1)  # type: ignore[misc]  # of a default


def test_abandoned_iterators_end_their_worker_processes(pictures: Path) -> None:
    with without_collector():
        buffers, process_ids, num_files = find_buffers(), find_worker_processes(), count_open_files()
        loader = make_loader(pictures)
        for number in (0, 3):
            iterator = iter(loader)
            kept = list(islice(iterator, number))
            del iterator
            assert find_worker_processes() <= process_ids
            assert find_buffers() - buffers == {buffer_of(images) for images, *_ in kept}
        del kept
        loader.set_epoch(0)
        assert_same(list(loader), list(make_oracle(pictures)))
        del loader
        assert find_worker_processes() <= process_ids
        assert find_buffers() <= buffers
        assert count_open_files() == num_files


def keep_an_epoch_under_a_limit(packed: str) -> None:
    """Keep more batches than this process and its worker process may have descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(48))
    order = [number % 100 for number in range(NUM_BATCHES)]
    loader = DataLoader(dataset, sampler=order, num_workers=1, persistent_workers=True)
    kept = list(loader)
    (process_id,) = find_worker_processes()
    assert len({buffer_of(images) for images, _ in kept}) == len(kept) == NUM_BATCHES
    num_files = count_open_files()
    assert num_files < 64
    kept += list(loader)
    assert count_open_files() == num_files
    assert find_worker_processes() == {process_id}
    assert len(find_buffers(process_id)) >= len(kept)
    assert len(list(Path(f"/proc/{process_id}/fd").iterdir())) < 64
    oracle = ShardMapDataset(packed, fields="key")
    assert [key for _, (key,) in kept] == [oracle[number] for number in [*order, *order]]


def test_kept_batches_hold_no_descriptors(pictures: Path) -> None:
    assert_passes_in_fresh_process(keep_an_epoch_under_a_limit, pictures)
