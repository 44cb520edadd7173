"""Which chunks worker processes make, and when, as seen from inside them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from shardio.loader import pool as pool_module
from tests.buffers import buffer_of, buffers_of, find_buffers
from tests.faults.worker_processes import (
    Data,
    batches_of,
    find_worker_processes,
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

MADE_BEFORE = 1  # Chunks before the first batch: one sample, to find the layout.


@pytest.fixture(autouse=True)
def _one_worker_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "divide_threads", lambda num_threads, _: [num_threads])


@pytest.mark.slow
def test_all_threads_make_parts_of_the_same_batch_at_a_time(data: Data, modules: Path) -> None:
    install_meeting(modules, 4, MADE_BEFORE)
    loader = make_loader(data, "shards", 4, batch_size=32, prefetch_factor=1)
    assert batches_of(loader) == batches_of(make_loader(data, batch_size=32))
    assert not (modules / "missed").exists()


def test_another_batch_is_begun_before_the_user_gets_one(data: Data, modules: Path) -> None:
    gate = install_gate(modules)
    iterator = iter(make_loader(data, "shards", 2, prefetch_factor=1))
    batch = next(iterator)
    wait_until(lambda: gate.count("begun") == MADE_BEFORE + 2 * 2, "the next batch is begun")
    assert len(batch) == 3


def test_a_batch_that_times_out_is_an_error(data: Data, modules: Path) -> None:
    install_gate(modules, held=range(100))
    with pytest.raises(RuntimeError, match=r"no batch arrived within timeout=0\.2 s: increase it"):
        next(iter(make_loader(data, "shards", 2, timeout=0.2)))
    assert find_worker_processes() == []


def test_pending_chunks_of_an_abandoned_epoch_are_not_made(data: Data, modules: Path) -> None:
    held = MADE_BEFORE + 1
    gate = install_gate(modules, held=range(held, held + 1))
    loader = make_loader(data, "map", 1, prefetch_factor=5, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    wait_until(lambda: gate.count("begun") == held + 1, "the worker process is at work on the second batch")
    (process_id,) = find_worker_processes()
    del iterator
    wait_until(lambda: len(find_buffers(process_id)) <= 2, "the worker process has dropped the buffers of the others")
    gate.open()
    assert len(batches_of(loader)) == 6
    assert gate.count("begun") == held + 1 + 6


def test_a_buffer_that_is_still_being_filled_is_not_reused(data: Data, modules: Path) -> None:
    """One thread makes a chunk of an abandoned epoch, while the other one makes all of the next epoch."""
    held = MADE_BEFORE + 2
    gate = install_gate(modules, held=range(held, held + 1))
    loader, oracle = make_loader(data, "shards", 2, persistent_workers=True), make_loader(data)
    iterator = iter(loader)
    assert plain(next(iterator)) == plain(next(iter(oracle)))
    wait_until(lambda: gate.count("begun") > held, "a thread is at work on the second batch")
    del iterator
    kept = list(loader)
    assert buffer_of(kept[0][0]) is not None, "or this shows nothing"
    gate.open()
    wait_until(lambda: gate.is_made(held), "that thread has finished its chunk")
    assert [plain(batch) for batch in kept] == batches_of(oracle)


@pytest.mark.slow
def test_a_thread_that_dies_ends_its_worker_process(data: Data, modules: Path) -> None:
    """A worker process with one thread less would answer pings, but never finish."""
    install_failure(modules)
    with warns_of_deaths():
        assert batches_of(make_loader(data, "shards", 1)) == batches_of(make_loader(data))
    assert (modules / "failed").exists()


@pytest.mark.slow
def test_after_a_death_only_buffers_that_the_new_worker_process_knows_are_used(data: Data, modules: Path) -> None:
    """What it cannot put into a buffer would be sent without one: right, but slow."""
    held = MADE_BEFORE + 12 + 1
    gate = install_gate(modules, held=range(held, held + 1))
    loader = make_loader(data, "shards", 2, batch_size=8, prefetch_factor=3, persistent_workers=True)
    buffers_of(loader)  # From here on there are buffers that are free.

    def kill_worker_process() -> None:
        wait_until(lambda: gate.count("made") >= held + 2, "there are batches after the pending one")
        for process_id in find_worker_processes():
            send_signal(process_id, signal.SIGKILL)
        gate.open()

    iterator: Iterator[list[object]] = iter(loader)
    with warns_of_deaths(), run_during(kill_worker_process):
        kept = list(islice(iterator, 4))
    kept.clear()
    for batches in (iterator, loader, loader):
        assert None not in buffers_of(batches)
