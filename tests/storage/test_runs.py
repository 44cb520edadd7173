"""Pieces that are read together equal pieces that are read one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio.sample import ByteRange
from shardio.storage import LocalFile, read_pieces
from shardio.storage.runs import MAX_GAP, MAX_RUN, MAX_SMALL

SIZE = 3 * MAX_RUN


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalFile, bytes]:
    path = tmp_path_factory.mktemp("runs") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return LocalFile(path), path.read_bytes()


def read(file: LocalFile, pieces: list[tuple[int, int]]) -> list[bytes]:
    starts, stops = (np.array([piece[side] for piece in pieces], dtype=np.int64) for side in (0, 1))
    return read_pieces(file, starts, stops)


lengths = st.sampled_from([0, 1, 100, 1024, MAX_SMALL, MAX_SMALL + 1, 100_000])


@given(st.lists(st.tuples(st.integers(0, SIZE), lengths), max_size=60))
@settings(deadline=None)
def test_any_pieces_in_any_order_come_as_they_are(
    content: tuple[LocalFile, bytes], places: list[tuple[int, int]]
) -> None:
    file, expected = content
    pieces = [(start, min(start + length, SIZE)) for start, length in places]
    assert read(file, pieces) == [expected[start:stop] for start, stop in pieces]


class CountingFile(LocalFile):
    """Counts its reads."""

    ranges: list[ByteRange]

    def read(self, where: ByteRange) -> bytes:
        self.ranges.append(where)
        return super().read(where)


def count_reads(file: LocalFile, pieces: list[tuple[int, int]]) -> list[int]:
    counting = CountingFile(file.path)
    counting.ranges = []
    read(counting, pieces)
    counting.close()
    return [where.size for where in counting.ranges]


def test_neighbours_are_read_by_one_call(content: tuple[LocalFile, bytes]) -> None:
    file, _ = content
    neighbours = [(number * 1536, number * 1536 + 1024) for number in range(512)]
    assert count_reads(file, neighbours) == [511 * 1536 + 1024]
    assert count_reads(file, neighbours[::-1]) == [511 * 1536 + 1024]


def test_large_pieces_far_ones_and_long_runs_are_read_apart(content: tuple[LocalFile, bytes]) -> None:
    file, _ = content
    assert count_reads(file, [(0, MAX_SMALL + 1), (MAX_SMALL + 1, MAX_SMALL + 2)]) == [MAX_SMALL + 1, 1]
    assert count_reads(file, [(0, 10), (10 + MAX_GAP, 20 + MAX_GAP)]) == [20 + MAX_GAP]
    assert count_reads(file, [(0, 10), (11 + MAX_GAP, 21 + MAX_GAP)]) == [10, 10]
    many = [(start, start + 1024) for start in range(0, SIZE, 1024)]
    sizes = count_reads(file, many)
    assert len(sizes) == 3
    assert max(sizes) <= MAX_RUN + MAX_SMALL
    assert sum(sizes) == SIZE


def test_a_piece_beyond_the_end_is_an_error(content: tuple[LocalFile, bytes]) -> None:
    file, _ = content
    with pytest.raises(EOFError, match=f"{file.path.name} ends at byte {SIZE}"):
        read(file, [(0, 10), (SIZE - 5, SIZE + 5)])
