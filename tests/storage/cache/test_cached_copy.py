"""A copy returns what was written to it, and nothing else."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings, strategies as st

from shardio.storage.cache.copies import BLOCK, CachedCopy

SIZE = 20 * BLOCK + 77
CONTENT = np.random.default_rng(0).bytes(SIZE)
NUM_BLOCKS = 21

blocks = st.tuples(st.integers(0, NUM_BLOCKS), st.integers(0, NUM_BLOCKS)).map(sorted)
ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)


def block_range(first: int, last: int) -> tuple[int, int]:
    return first * BLOCK, min(last * BLOCK, SIZE)


@given(st.lists(st.tuples(st.booleans(), blocks), max_size=12), st.lists(ranges, min_size=1, max_size=20))
@settings(deadline=None)
def test_a_range_is_present_if_all_its_blocks_were_written(
    operations: list[tuple[bool, list[int]]], wanted: list[list[int]]
) -> None:
    present = np.zeros(NUM_BLOCKS, np.bool_)  # The model.
    with tempfile.TemporaryDirectory() as folder:
        copy = CachedCopy(path=f"{folder}/x.copy", size=SIZE)
        for is_write, (first, last) in operations:
            start, stop = block_range(first, last)
            if not is_write:
                copy.unmark(start, stop)
            elif first < last:
                copy.write(start, memoryview(CONTENT)[start:stop])
            present[first:last] = is_write
        expected = [
            CONTENT[start:stop] if start == stop or present[start // BLOCK : -(-stop // BLOCK)].all() else None
            for start, stop in wanted
        ]
        assert copy.read([start for start, _ in wanted], [stop for _, stop in wanted]) == expected
        for (start, stop), content in zip(wanted, expected, strict=True):
            if start == stop:
                continue
            buffer = memoryview(bytearray(stop - start))
            if copy.read_into(start, buffer):
                assert bytes(buffer) == content
            else:
                assert content is None
            missing = np.zeros(SIZE, np.bool_)
            for begin, end in copy.find_missing(start, stop):
                missing[begin:end] = True
            absent = np.repeat(~present, BLOCK)[:SIZE]
            assert (missing[start:stop] == absent[start:stop]).all()


def test_a_removed_copy_is_read_by_those_who_opened_it_and_missing_for_others(tmp_path: Path) -> None:
    copy = CachedCopy(path=str(tmp_path / "x.copy"), size=SIZE)
    copy.write(0, memoryview(CONTENT))
    with copy._opened(os.O_RDONLY) as descriptor:
        assert descriptor is not None
        Path(copy.path).unlink()
        assert os.pread(descriptor, SIZE, 0) == CONTENT
    assert copy.read([0], [10]) == [None]
    assert not copy.unmark(0, 10)


def test_a_copy_takes_only_the_space_of_its_blocks(tmp_path: Path) -> None:
    copy = CachedCopy(path=str(tmp_path / "x.copy"), size=10**9)
    copy.write(5 * 10**6 // BLOCK * BLOCK, memoryview(bytes(BLOCK)))
    assert Path(copy.path).stat().st_blocks * 512 < 100_000
