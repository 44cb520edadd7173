"""The files of a folder share bundles without overlapping, and a change concerns only its own bundle."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from shardio.storage import parse_location
from shardio.storage.cache.copies import (
    BLOCK,
    HASH_BYTES,
    MEAN_BYTES,
    cut_bundles,
    hash_content,
    make_tail,
    size_in_bundle,
)
from shardio.storage.listing import Listing, make_listing

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


def test_a_bundle_has_16_mb_on_average() -> None:
    bundles = cut_bundles(listing_of({f"{i}.jpg": 100_000 for i in range(100_000)}))
    assert 0.8 * MEAN_BYTES < bundles.sizes.mean() < 1.25 * MEAN_BYTES


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


def test_another_version_is_another_bundle() -> None:
    first, second = (cut_bundles(listing_of({"a": 1}, version)).names for version in ("1", "2"))
    assert first != second


@given(st.binary(max_size=2000))
def test_a_content_and_its_hash_fill_whole_blocks(content: bytes) -> None:
    tail = make_tail(content)
    assert tail.startswith(hash_content(content))
    assert len(content) + len(tail) == size_in_bundle(len(content))


@given(FILES, st.text(max_size=8))
def test_a_listing_finds_its_files_and_no_others(sizes: dict[str, int], other: str) -> None:
    listing = listing_of(sizes)
    for number, key in enumerate(listing.keys):
        assert listing.find(key) == number
    assert other in sizes or listing.find(f"images/{other}") is None
