"""Worker processes see what another process sets, however they are started, at almost no cost."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection

import pytest

from shardio import shared
from shardio.shared import ARENA_LINES, SharedNumbers
from tests.files import count_open_files
from tests.processes import forkserver_context


def work(cells: list[SharedNumbers], count: SharedNumbers, end: Connection) -> None:
    """Send the cells' values on request; count the requests; and create another cell."""
    own = SharedNumbers([-1, -2])
    while end.recv():
        with count.locked():
            count.array[19] += 1
        cells[-1].array[:] = 19
        end.send([cell.values for cell in [*cells, own]])


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_see_what_the_others_set(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = forkserver_context() if method == "forkserver" else multiprocessing.get_context(method)
    cells, count = [SharedNumbers(values) for values in ([5], [-(2**63), 2**63 - 1], [0, 0])], SharedNumbers([0] * 20)
    with monkeypatch.context() as patched:
        patched.delattr(os, "memfd_create")  # As on macOS.
        patched.setattr(shared, "_arena", None)
        cells.insert(0, SharedNumbers([6]))
    end, theirs = context.Pipe()
    process = context.Process(target=work, args=(cells, count, theirs), daemon=True)  # type: ignore[attr-defined]
    process.start()
    for value in range(3):
        cells[0].array[:] = 10 + value
        cells[1].array[:] = value
        after = SharedNumbers([value])  # Created while the worker runs: it must not share memory with the worker's.
        end.send(True)
        assert end.recv() == [(10 + value,), (value,), (-(2**63), 2**63 - 1), (19, 19), (-1, -2)]
        assert cells[-1].values == (19, 19)
        assert sum(count.values) == value + 1
        assert after.values == (value,)
    end.send(False)
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_a_copy_has_its_own_numbers_unless_it_goes_to_a_worker(copied: type) -> None:
    cell = SharedNumbers([1, 2])
    other = copied(cell)
    cell.array[:] = 3, 4
    assert other.values == (1, 2)


def test_any_number_of_cells_holds_few_descriptors() -> None:
    before = count_open_files()
    cells = [SharedNumbers([number, -number]) for number in range(3 * ARENA_LINES)]
    assert count_open_files() - before <= 8
    assert [cell.values for cell in cells] == [(number, -number) for number in range(3 * ARENA_LINES)]
    del cells
    assert count_open_files() - before <= 2
    long = [SharedNumbers([number] * 1000) for number in range(3)]
    assert [each.values for each in long] == [(number,) * 1000 for number in range(3)]
    del long
    assert count_open_files() - before <= 2, "their memory is freed"
