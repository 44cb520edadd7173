"""Which chunks worker processes make, and when, as seen from inside them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from shardio.loader.processes import pool as pool_module
from tests.faults.worker_processes import (
    KINDS,
    Data,
    Kind,
    batches_of,
    find_hosts,
    install_failure,
    install_gate,
    install_meeting,
    make_loader,
    plain,
    run_during,
    send_signal,
    wait_until,
    warns_of_deaths,
)
from tests.slots import find_slots, slot_of, slots_of

MADE_BEFORE = 1
"""Chunks before the first batch: one sample, to see what is of fixed size."""


@pytest.fixture(autouse=True)
def _one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all threads in one host, on any machine."""
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: [num_threads])


def test_all_threads_make_parts_of_the_same_batch_at_a_time(data: Data, modules: Path) -> None:
    install_meeting(modules, 4, MADE_BEFORE)
    loader = make_loader(data, "shards", 4, batch_size=32, prefetch_factor=1)
    assert batches_of(loader) == batches_of(make_loader(data, batch_size=32))
    assert not (modules / "missed").exists()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_another_batch_is_begun_before_the_user_gets_one(data: Data, modules: Path, num_workers: int) -> None:
    gate = install_gate(modules)
    iterator = iter(make_loader(data, "shards", num_workers, prefetch_factor=1))
    batch = next(iterator)
    wait_until(lambda: gate.num_begun == MADE_BEFORE + 2 * num_workers, "the next batch is begun")
    assert len(batch) == 3


def test_a_batch_that_does_not_come_in_time_is_an_error(data: Data, modules: Path) -> None:
    install_gate(modules, held=range(100))
    with pytest.raises(RuntimeError, match=r"no batch arrived within timeout=0\.2 s: increase it"):
        next(iter(make_loader(data, "shards", 2, timeout=0.2)))
    assert find_hosts() == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_epoch_that_was_left_had_asked_for_is_not_made(data: Data, modules: Path, kind: Kind) -> None:
    held = MADE_BEFORE + 1
    gate = install_gate(modules, held=range(held, held + 1))
    loader = make_loader(data, kind, 1, prefetch_factor=5, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    wait_until(lambda: gate.num_begun == held + 1, "the host is at work on the second batch")
    (host,) = find_hosts()
    del iterator
    wait_until(lambda: len(find_slots(host)) <= 2, "the host has heard that the others are not wanted")
    gate.open()
    assert len(batches_of(loader)) == 6
    assert gate.num_begun == held + 1 + 6


def test_nobody_gets_a_slot_that_is_still_being_filled(data: Data, modules: Path) -> None:
    """One thread makes something for an epoch that was left, while the other one makes all of the next epoch."""
    held = MADE_BEFORE + 2
    gate = install_gate(modules, held=range(held, held + 1))
    loader, oracle = make_loader(data, "shards", 2, persistent_workers=True), make_loader(data)
    iterator = iter(loader)
    assert plain(next(iterator)) == plain(next(iter(oracle)))
    wait_until(lambda: gate.num_begun > held, "a thread is at work on the second batch")
    del iterator
    kept = list(loader)
    gate.open()
    wait_until(lambda: gate.is_made(held), "that thread has written what it has to write")
    assert [plain(batch) for batch in kept] == batches_of(oracle)


def test_a_thread_that_dies_takes_its_host_along(data: Data, modules: Path) -> None:
    """A host with one thread less would answer, and never be done."""
    install_failure(modules)
    with warns_of_deaths():
        assert batches_of(make_loader(data, "shards", 1)) == batches_of(make_loader(data))
    assert (modules / "failed").exists()


def test_after_a_death_no_slot_is_used_that_the_new_host_does_not_know(data: Data, modules: Path) -> None:
    """What it cannot put into a slot would come beside it: right, and slow."""
    held = MADE_BEFORE + 12 + 1
    gate = install_gate(modules, held=range(held, held + 1))
    loader = make_loader(data, "shards", 2, batch_size=8, prefetch_factor=3, persistent_workers=True)
    slots_of(loader)  # From here on there are slots that are free.

    def kill_host() -> None:
        wait_until(lambda: gate.num_made >= held + 2, "there are batches behind the one that is waited for")
        for process_id in find_hosts():
            send_signal(process_id, signal.SIGKILL)
        gate.open()

    iterator: Iterator[list[object]] = iter(loader)
    with warns_of_deaths(), run_during(kill_host):
        kept = list(islice(iterator, 4))
    kept.clear()
    for batches in (iterator, loader, loader):
        assert None not in slots_of(batches)


def test_slots_are_where_images_lie(data: Data) -> None:
    """Or the tests above would show nothing."""
    images, *_ = next(iter(make_loader(data, "shards", 1)))
    assert slot_of(images) is not None
