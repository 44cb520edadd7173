"""A SharedList is a list in shared arrays. Worker processes see the values that another process sets."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import random
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardio import SharedList, shared
from shardio.shared import ARENA_LINES, SharedNumbers
from tests.files import find_open_files
from tests.processes import forkserver_context
from tests.raising import assert_raises

SCALARS = [
    st.text(st.characters(codec=None)),
    st.binary(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
]
ROWS = st.recursive(st.sampled_from(SCALARS), lambda rows: st.lists(rows, max_size=3).map(lambda r: st.tuples(*r)))


@given(ROWS.flatmap(lambda row: st.lists(row, max_size=20)), st.data())
def test_it_is_the_list(values: list[Any], data: st.DataObject) -> None:
    shared = SharedList(values)
    assert list(shared) == values == shared
    assert ([type(value) for value in shared], len(shared)) == ([type(value) for value in values], len(values))
    assert list(reversed(shared)) == values[::-1]
    chosen = data.draw(st.slices(len(values)))
    assert shared[chosen] == values[chosen]
    for index in range(-len(values), len(values)):
        assert shared[index] == values[index]
    for other in (pickle.loads(pickle.dumps(shared)), SharedList(iter(values))):
        assert other == shared
    assert (shared + values[:1], values[:1] + shared) == (values + values[:1], values[:1] + values)
    assert shared * 2 == 2 * shared == values * 2


VALUES = st.lists(st.tuples(st.text(max_size=5), st.integers(-(2**63), 2**63 - 1)), max_size=6)


@given(st.lists(VALUES, max_size=5))
def test_lists_are_joined_one_after_another(lists: list[list[tuple[str, int]]]) -> None:
    joined = SharedList.joined(map(SharedList, lists))
    assert joined == [value for each in lists for value in each]
    assert pickle.loads(pickle.dumps(joined)) == joined


def test_long_lists_are_read_in_blocks() -> None:
    values = [(f"class-{number % 7}/ünder-{number}.jpg", number) for number in range(10_000)]
    assert list(SharedList(values)) == values


def test_it_is_compared_and_copied_as_a_list_is() -> None:
    shared = SharedList(["a", "b"])
    for other in (["a"], ["a", "c"], "ab", ("a", "b"), 5):
        assert shared != other
    assert shared < ["a", "c"]
    assert shared >= SharedList(["a", "b"])
    with pytest.raises(TypeError):
        assert shared < ("b",)
    shared.append("c")
    for copied in (shared.copy(), copy.copy(shared)):
        copied.append("d")
        assert copied == ["a", "b", "c", "d"]
    assert shared == ["a", "b", "c"]


def test_it_can_be_changed_and_sent_afterwards() -> None:
    values = [(f"{number}.jpg", number) for number in range(50)]
    shared = SharedList(values)
    for changed in (values, shared):
        changed[3] = ("other.jpg", -1)
        del changed[10:20]
        changed.insert(4, ("inserted.jpg", -2))
        changed.append(("last.jpg", 60))
        changed += [("more.jpg", 61)]
        random.Random(1).shuffle(changed)
        changed.sort(key=lambda sample: sample[1] % 7)
        changed.remove(("7.jpg", 7))
        changed.pop()
    assert shared == values
    sent: Any = pickle.loads(pickle.dumps(shared))
    assert sent == values
    assert len(pickle.dumps(sent)) < 5000
    shared[0] = ("text", "text")  # A string can replace a number.
    assert pickle.loads(pickle.dumps(shared)) == shared


def test_it_has_a_text_but_no_hash_and_no_other_elements() -> None:
    shared: Any = SharedList([1, 2])
    assert (repr(shared), repr(SharedList(range(5)))) == (
        "SharedList([1, 2], 2 values)",
        "SharedList([0, 1, 2, …], 5 values)",
    )
    assert_raises(TypeError, "unhashable", hash, shared)
    for index in (2, -3):
        assert_raises(IndexError, None, shared.__getitem__, index)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["a", 1], "value 0 is of type str and value 1 of type int"),
        ([("a", 1), ("b", None)], "in element 1, value 0 is of type int and value 1 of type NoneType"),
        ([("a", ("b", 1)), ("b", ("c", 2.5))], "in element 1, in element 1, value 0 is of type int and value 1"),
        ([("a", 1), ("b",)], "value 0 has 2 elements and value 1 has 1"),
        ([[1]], "value 0 is of type list"),
        ([np.int64(1)], "value 0 is of type int64"),
        ([True, 1], "value 0 is of type bool and value 1 of type int"),
        ([2**63], None),
    ],
)
def test_other_values_are_refused_by_name(values: list[Any], message: str | None) -> None:
    assert_raises(TypeError if message else OverflowError, message, SharedList, values)


def test_its_memory_is_in_a_few_buffers_outside_of_its_pickle() -> None:
    shared = SharedList([(f"{number:08d}", number) for number in range(1000)])
    buffers = list[pickle.PickleBuffer]()
    content = pickle.dumps(shared, protocol=5, buffer_callback=buffers.append)
    assert len(content) < 1000
    assert sum(len(buffer.raw()) for buffer in buffers) == 8 * 1000 + 8 * 1001 + 8 * 1000
    assert pickle.loads(content, buffers=buffers) == shared


def work(cells: list[SharedNumbers], count: SharedNumbers, end: Connection) -> None:
    """Create another cell, send all cells' values on request, and count the requests."""
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
        after = SharedNumbers([value])  # The new cell must not share memory with the worker's own cell.
        end.send(True)
        assert end.recv() == [(10 + value,), (value,), (-(2**63), 2**63 - 1), (19, 19), (-1, -2)]
        assert (cells[-1].values, sum(count.values), after.values) == ((19, 19), value + 1, (value,))
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
    before = find_open_files(with_shared_numbers=True)
    cells = [SharedNumbers([number, -number]) for number in range(3 * ARENA_LINES)]
    assert len(find_open_files(with_shared_numbers=True) - before) <= 8
    assert [cell.values for cell in cells] == [(number, -number) for number in range(3 * ARENA_LINES)]
    del cells
    assert len(find_open_files(with_shared_numbers=True) - before) <= 2
    long = [SharedNumbers([number] * 1000) for number in range(3)]
    assert [each.values for each in long] == [(number,) * 1000 for number in range(3)]
    del long
    assert len(find_open_files(with_shared_numbers=True) - before) <= 2, "their memory is freed"
