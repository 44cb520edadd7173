"""Many headers compared at once; oracles: tarfile, and the function that compares one header."""

from __future__ import annotations

import tarfile
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from shardio.shards.tar import BLOCK, are_plain_headers, header_fits, make_header

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=130)
SIZES = st.integers(0, 2**34)
Format = Literal[0, 1, 2]
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def as_blocks(headers: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(header[-BLOCK:] for header in headers), np.uint8).reshape(-1, BLOCK)


def compare(headers: list[bytes], names: list[bytes], sizes: list[int]) -> list[bool]:
    found: list[bool] = are_plain_headers(as_blocks(headers), names, np.array(sizes, np.int64)).tolist()
    return found


def dump(name: str, size: int, tar_format: Format) -> bytes:
    """Return the header that tarfile writes; an empty block if the format cannot hold the name or the size."""
    info = tarfile.TarInfo(name)
    info.size = size
    try:
        return info.tobuf(tar_format, errors="surrogateescape")
    except ValueError:
        return bytes(BLOCK)


@given(members=st.lists(st.tuples(NAMES, SIZES, FORMATS), min_size=1, max_size=5), other=st.tuples(NAMES, SIZES))
def test_a_block_that_fits_has_the_name_and_the_size_that_tarfile_reads(
    members: list[tuple[str, int, Format]], other: tuple[str, int]
) -> None:
    headers = [dump(*member) for member in members]
    for expected in ([member[:2] for member in members], [other] * len(members)):
        names, sizes = [name.encode() for name, _ in expected], [size for _, size in expected]
        for header, name, size, is_plain in zip(headers, names, sizes, compare(headers, names, sizes), strict=True):
            if is_plain:
                read = tarfile.TarInfo.frombuf(header[-BLOCK:], "utf-8", "strict")
                assert (read.name.encode(), read.size) == (name, size)
                assert header_fits(header[-BLOCK:], name, b"", size)


def test_the_headers_that_shardio_writes_are_plain_up_to_99_bytes() -> None:
    names = ["a", "b/c.jpg", *("n" * length for length in range(95, 104))]
    sizes = list(range(len(names)))
    found = compare(
        [make_header(name, size) for name, size in zip(names, sizes, strict=True)], [*map(str.encode, names)], sizes
    )
    assert found == [len(name) < 100 for name in names]


@pytest.mark.parametrize("size", [0, 1, 511, 2**31, 8**11 - 1])
def test_all_sizes_of_11_digits_are_compared(size: int) -> None:
    header = make_header("a.bin", size)
    assert compare([header, header, header], [b"a.bin"] * 3, [size, size + 1, size + 8**11]) == [True, False, False]


@pytest.mark.parametrize("name", [b"a.jp", b"a.jpg.", b"b.jpg", b"A.jpg", b"", b"a.jpg" + b"x" * 200])
def test_another_name_does_not_fit(name: bytes) -> None:
    header = make_header("a.jpg", 5)
    assert compare([header, header], [b"a.jpg", name], [5, 5]) == [True, False]


def test_no_headers_are_no_answer() -> None:
    assert are_plain_headers(np.empty((0, BLOCK), np.uint8), [], np.empty(0, np.int64)).tolist() == []
