"""A file read in pieces."""

from __future__ import annotations

import mmap
import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from shardio.storage import PIECE, parse_location, read_pieces


@pytest.mark.parametrize("num_bytes", [999, 2**17, PIECE])
@pytest.mark.parametrize("size", [0, 1, 999, 1000, 2**17, 2 * PIECE + 5])
@pytest.mark.parametrize("start", [0, 1000])
def test_pieces_joined_are_the_file(tmp_path: Path, size: int, num_bytes: int, start: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    with closing(parse_location(tmp_path / "file").open()) as file:
        pieces = [bytes(piece) for piece in read_pieces(file, start, num_bytes)]
    assert b"".join(pieces) == content[start:]
    assert all(len(piece) == num_bytes for piece in pieces[:-1])


def test_large_pieces_begin_where_a_page_does(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3 * PIECE))
    with closing(parse_location(tmp_path / "file").open()) as file:
        addresses = {np.frombuffer(piece, np.uint8).ctypes.data for piece in read_pieces(file)}
    assert [address % mmap.PAGESIZE for address in addresses] == [0]
