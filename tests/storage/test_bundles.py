"""The files of a folder share bundles without overlapping, and a copy returns what was written to it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import xxhash
from hypothesis import given, settings, strategies as st

from shardio.storage import parse_location
from shardio.storage.copies import BLOCK, CachedCopy
from shardio.storage.listing import (
    HASH_BYTES,
    MEAN_BYTES,
    Listing,
    cut_bundles,
    make_listing,
    make_tail,
    size_in_bundle,
)
from tests.storage.conftest import write_copy

FOLDER = parse_location("s3://bucket/images")


def listing_of(sizes: dict[str, int], version: str = "1") -> Listing:
    return make_listing(FOLDER, [(f"images/{key}", size, version) for key, size in sorted(sizes.items())], [])


FILES = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, MEAN_BYTES), max_size=40)


@given(FILES)
def test_each_file_has_whole_blocks_of_its_own(sizes: dict[str, int]) -> None:
    listing = listing_of(sizes)
    bundles = cut_bundles(listing)
    assert len(bundles.names) == len(set(bundles.names)) == len(bundles.sizes)
    stops = bundles.starts + listing.sizes + HASH_BYTES
    for number in range(len(bundles.names)):
        rows = np.flatnonzero(bundles.numbers == number)
        starts = bundles.starts[rows]
        assert not np.any(starts % BLOCK)
        assert starts[0] == 0
        assert np.all(stops[rows][:-1] <= starts[1:])
        assert stops[rows][-1] <= bundles.sizes[number] < stops[rows][-1] + BLOCK


def test_a_bundle_has_16_mb_on_average_and_one_version() -> None:
    bundles = cut_bundles(listing_of({f"{i}.jpg": 100_000 for i in range(30_000)}))
    assert 0.8 * MEAN_BYTES < bundles.sizes.mean() < 1.25 * MEAN_BYTES
    first, second = (cut_bundles(listing_of({"a": 1}, version)).names for version in ("1", "2"))
    assert first != second


@settings(max_examples=10)
@given(st.integers(0, 2999), st.sampled_from(["add", "remove", "resize"]))
def test_a_changed_file_changes_one_bundle_or_joins_or_parts_two(number: int, change: str) -> None:
    sizes = {f"{i:04d}.jpg": 200_000 for i in range(3000)}
    before = set(cut_bundles(listing_of(sizes)).names)
    if change == "add":
        sizes[f"{number:04d}-.jpg"] = 200_000
    elif change == "remove":
        del sizes[f"{number:04d}.jpg"]
    else:
        sizes[f"{number:04d}.jpg"] = 300_000
    after = set(cut_bundles(listing_of(sizes)).names)
    assert 1 <= len(after - before) <= 2
    assert 1 <= len(before - after) <= 2


@given(st.binary(max_size=2000))
def test_a_content_and_its_hash_fill_whole_blocks(content: bytes) -> None:
    tail = make_tail(content)
    assert tail.startswith(xxhash.xxh3_128_digest(content))
    assert len(content) + len(tail) == size_in_bundle(len(content))


@given(FILES, st.text(max_size=8))
def test_a_listing_finds_its_files_and_no_others(sizes: dict[str, int], other: str) -> None:
    listing = listing_of(sizes)
    for number, key in enumerate(listing.keys):
        assert listing.find(key) == number
    assert other in sizes or listing.find(f"images/{other}") is None


# Copies

SIZE = 20 * BLOCK + 77
CONTENT = np.random.default_rng(0).bytes(SIZE)
NUM_BLOCKS = 21

blocks = st.tuples(st.integers(0, NUM_BLOCKS), st.integers(0, NUM_BLOCKS)).map(sorted)
ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)


def block_range(first: int, last: int) -> tuple[int, int]:
    return first * BLOCK, min(last * BLOCK, SIZE)


@given(st.lists(st.tuples(st.booleans(), blocks), max_size=12), st.lists(ranges, min_size=1, max_size=20))
def test_a_range_is_present_if_its_blocks_are(
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
                write_copy(copy, start, CONTENT[start:stop])
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
    write_copy(copy, 0, CONTENT)
    with copy._opened(os.O_RDONLY) as descriptor:
        assert descriptor is not None
        Path(copy.path).unlink()
        assert os.pread(descriptor, SIZE, 0) == CONTENT
    assert copy.read([0], [10]) == [None]
    assert not copy.unmark(0, 10)


def test_a_copy_takes_only_the_space_of_its_blocks(tmp_path: Path) -> None:
    copy = CachedCopy(path=str(tmp_path / "x.copy"), size=10**9)
    write_copy(copy, 5 * 10**6 // BLOCK * BLOCK, bytes(BLOCK))
    assert Path(copy.path).stat().st_blocks * 512 < 100_000
