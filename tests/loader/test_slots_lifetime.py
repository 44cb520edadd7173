"""What slots cost: memory, descriptors and processes, which go when the last one goes who needs them."""

from __future__ import annotations

import resource
from itertools import islice
from pathlib import Path

import pytest

from shardio import DataLoader, ShardMapDataset
from shardio.transforms import RandomResizedCrop
from tests.files import count_open_files
from tests.processes import assert_passes_in_fresh_process
from tests.slots import (
    NUM_SLOTS,
    assert_same,
    find_hosts,
    find_slots,
    make_loader,
    make_oracle,
    slot_of,
    slots_of,
    wait_until,
    without_collector,
)

NUM_BATCHES = 320
"""More than a process may have descriptors in a test below."""


@pytest.mark.parametrize("persistent", [False, True])
def test_memory_descriptors_and_hosts_go_with_the_loader(pictures: Path, persistent: bool) -> None:
    list(make_loader(pictures))  # What is opened but once is open now.
    with without_collector():
        slots, hosts, num_files = find_slots(), find_hosts(), count_open_files()
        loader = make_loader(pictures, num_workers=3, persistent_workers=persistent)
        kept = list(loader)
        iterator = iter(loader)
        kept += islice(iterator, 3)
        assert len(find_hosts() - hosts) > 1
        assert len(find_slots() - slots) >= len(kept)
        del loader, iterator
        assert find_hosts() <= hosts
        assert count_open_files() == num_files
        assert find_slots() - slots == {slot_of(images) for images, *_ in kept}
        oracle = make_oracle(pictures)
        assert_same(kept, [*oracle, *islice(oracle, 3)])
        kept.clear()
        assert find_slots() <= slots


def test_slots_for_batches_that_were_kept_are_given_back(pictures: Path) -> None:
    with without_collector():
        slots, hosts = find_slots(), find_hosts()
        loader = make_loader(pictures, persistent_workers=True)
        for _ in range(2):
            kept = list(loader)
            assert len(find_slots() - slots) >= len(kept)
            del kept
            slots_of(loader)
            assert len(find_slots() - slots) <= NUM_SLOTS + 1
        for host in find_hosts() - hosts:
            wait_until(lambda host=host: len(find_slots(host)) <= NUM_SLOTS + 1)  # type: ignore[misc]  # of a default


def test_abandoned_iterators_leave_nothing_behind(pictures: Path) -> None:
    with without_collector():
        slots, hosts = find_slots(), find_hosts()
        loader = make_loader(pictures, persistent_workers=True)
        slots_of(loader)
        mine = find_hosts() - hosts
        num_files = count_open_files()
        for number in range(100):
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
        slots_of(loader)
        assert find_hosts() - hosts == mine
        assert len(find_slots() - slots) <= NUM_SLOTS + 1
        for host in mine:
            wait_until(lambda host=host: len(find_slots(host)) <= NUM_SLOTS + 1)  # type: ignore[misc]  # of a default


def test_abandoned_iterators_take_their_hosts_with_them(pictures: Path) -> None:
    list(make_loader(pictures))
    with without_collector():
        slots, hosts, num_files = find_slots(), find_hosts(), count_open_files()
        loader = make_loader(pictures)
        for number in range(4):
            iterator = iter(loader)
            kept = list(islice(iterator, number))
            del iterator
            assert find_hosts() <= hosts
            assert find_slots() - slots == {slot_of(images) for images, *_ in kept}
        del kept
        loader.set_epoch(0)
        assert_same(list(loader), list(make_oracle(pictures)))
        del loader
        assert find_hosts() <= hosts
        assert find_slots() <= slots
        assert count_open_files() == num_files


def keep_an_epoch_under_a_limit(packed: str) -> None:
    """Keep more batches than this process, and its host, may have descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    dataset = ShardMapDataset(packed, fields=("image", "key"), transform=RandomResizedCrop(48))
    order = [number % 100 for number in range(NUM_BATCHES)]
    loader = DataLoader(dataset, sampler=order, num_workers=1, persistent_workers=True)
    kept = list(loader)
    (host,) = find_hosts()
    assert len({slot_of(images) for images, _ in kept}) == len(kept) == NUM_BATCHES
    num_files = count_open_files()
    assert num_files < 128
    kept += list(loader)
    assert count_open_files() == num_files
    assert find_hosts() == {host}
    assert len(find_slots(host)) >= len(kept)
    assert len(list(Path(f"/proc/{host}/fd").iterdir())) < 128
    oracle = ShardMapDataset(packed, fields="key")
    assert [key for _, (key,) in kept] == [oracle[number] for number in [*order, *order]]


def test_kept_batches_hold_no_descriptors(pictures: Path) -> None:
    assert_passes_in_fresh_process(keep_an_epoch_under_a_limit, pictures)
