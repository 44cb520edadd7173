"""Worker processes see what another process sets, however they are started, at almost no cost."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection

import pytest

from shardio.shared import ARENA_LINES, SharedCell, SharedCount, SharedNumbers
from tests.files import count_open_files
from tests.processes import forkserver_context


def work(cells: list[SharedCell], count: SharedCount, worker_id: int, end: Connection) -> None:
    """Send the cells' values on request; count the requests; and create another cell."""
    own = SharedCell(-1, -2)
    while end.recv():
        count.add_one(worker_id)
        cells[-1].set(worker_id, worker_id)
        end.send([cell.values for cell in [*cells, own]])


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_see_what_the_others_set(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = forkserver_context() if method == "forkserver" else multiprocessing.get_context(method)
    cells, count = [SharedCell(5), SharedCell(-(2**63), 2**63 - 1), SharedCell(0, 0)], SharedCount(20)
    with monkeypatch.context() as patched:
        patched.delattr(os, "memfd_create")  # As on macOS, where torch's memory is used.
        cells.insert(0, SharedCell(6))
    end, theirs = context.Pipe()
    process = context.Process(target=work, args=(cells, count, 19, theirs), daemon=True)  # type: ignore[attr-defined]
    process.start()
    for value in range(3):
        cells[0].set(10 + value)
        cells[1].set(value)
        after = SharedCell(value)  # Created while the worker runs: it must not share the memory of the worker's cells.
        end.send(True)
        assert end.recv() == [(10 + value,), (value,), (-(2**63), 2**63 - 1), (19, 19), (-1, -2)]
        assert cells[-1].values == (19, 19)
        assert count.total == value + 1
        assert after.values == (value,)
    end.send(False)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_a_copy_has_its_own_numbers_unless_it_goes_to_a_worker(copied: type) -> None:
    cell, count = SharedCell(1, 2), SharedCount(2)
    other, other_count = copied(cell), copied(count)
    cell.set(3, 4)
    count.add_one(0)
    assert (other.values, other_count.total) == ((1, 2), 0)


def test_any_number_of_cells_holds_few_descriptors() -> None:
    before = count_open_files()
    cells = [SharedCell(number, -number) for number in range(3 * ARENA_LINES)]
    assert count_open_files() - before <= 8
    assert [cell.values for cell in cells] == [(number, -number) for number in range(3 * ARENA_LINES)]
    del cells
    assert count_open_files() - before <= 2


def test_long_arrays_have_memory_of_their_own_which_is_freed() -> None:
    before = count_open_files()
    counts = [SharedNumbers([number] * 1000) for number in range(3)]
    assert [count.array.tolist() for count in counts] == [[number] * 1000 for number in range(3)]
    del counts
    assert count_open_files() == before
