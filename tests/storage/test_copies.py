"""Bundles and cached copies: what was written is read, and what other users may have written is not believed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import typer
import xxhash
from hypothesis import given, settings, strategies as st

from shardio.cli.options import read_remote_arguments
from shardio.errors import StoreError
from shardio.storage import Location, make_access, parse_location
from shardio.storage.copies import BLOCK, COPY_SUFFIX, CachedCopy, name_copy
from shardio.storage.listing import (
    HASH_BYTES,
    MEAN_BYTES,
    Listing,
    cut_bundles,
    make_listing,
    make_tail,
    size_in_bundle,
)
from tests.files import OTHER_USER, as_root, mode_of, umask
from tests.raising import assert_raises
from tests.storage.conftest import in_memory, put, write_copy

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


ORIGINAL, PLANTED = b"original" * BLOCK, b"planted!" * BLOCK


@pytest.fixture
def location() -> Location:
    return put(in_memory(), ORIGINAL)


def read(location: Location, cache: Path, *, shared: bool = False) -> bytes:
    with closing(parse_location(str(location), make_access(cache=cache, cache_shared=shared)).open()) as file:
        return file.read(0, file.size)


def plant(location: Location, cache: Path) -> Path:
    cache.mkdir(exist_ok=True)
    path = cache / name_copy(location.stat())
    write_copy(CachedCopy(path=str(path), size=len(PLANTED)), 0, PLANTED)
    return path


def link_to(path: Path) -> None:
    path.rename(path.with_suffix(".target"))
    path.symlink_to(path.with_suffix(".target"))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    "make_doubtful",
    [
        pytest.param(lambda path: os.chown(path, OTHER_USER, -1), marks=as_root, id="another's"),
        lambda path: path.chmod(0o666),
        link_to,
        make_fifo,
    ],
)
def test_a_doubtful_copy_is_replaced(
    make_doubtful: Callable[[Path], object], location: Location, tmp_path: Path
) -> None:
    path = plant(location, tmp_path / "cache")
    assert read(location, tmp_path / "cache") == PLANTED, "the copy is where it is looked for"
    make_doubtful(path)
    assert (read(location, tmp_path / "cache"), stat.S_IMODE(path.lstat().st_mode)) == (ORIGINAL, 0o600)
    assert path.lstat().st_uid == os.geteuid()


@pytest.mark.parametrize(
    ("owner", "mode"), [pytest.param(OTHER_USER, 0o755, marks=as_root), (None, 0o777), (None, 0o775)]
)
def test_a_folder_that_others_write_to_is_refused(
    owner: int | None, mode: int, location: Location, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "notes.txt").touch()  # It has other uses.
    cache.chmod(mode)
    if owner is not None:
        os.chown(cache, owner, -1)
    with pytest.raises(StoreError, match=rf"the cache {cache} belongs to .* has mode {mode:04o}.*cache_shared=True"):
        read(location, cache)
    assert (mode_of(cache), read(location, cache, shared=True)) == (mode, ORIGINAL)


def test_where_all_users_may_create_files_a_cache_has_a_folder_of_its_own(location: Location, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    planted = plant(location, tmp_path / "other")
    (cache := tmp_path / "cache").mkdir()
    cache.chmod(0o1777)  # As /tmp.
    planted.rename(cache / planted.name)
    assert read(location, cache) == ORIGINAL
    own = cache / f"shardio-{os.geteuid()}"
    assert (mode_of(own), mode_of(cache), read(location, cache, shared=True)) == (0o700, 0o1777, PLANTED)


def test_an_own_folder_for_a_cache_alone_is_closed_to_others(location: Location, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with umask(0):
        assert read(location, cache) == ORIGINAL
    assert mode_of(cache) == 0o700
    shutil.rmtree(cache)
    cache.mkdir()
    cache.chmod(0o775)  # As new folders are where each user has a group.
    assert (read(location, cache), mode_of(cache)) == (ORIGINAL, 0o755)


def test_a_shared_cache_may_be_deleted_at_any_time(location: Location, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        assert parse_location(str(location), make_access(cache=cache, cache_shared=True)).read_whole() == ORIGINAL
        shutil.rmtree(cache)


def test_a_cache_is_shared_only_if_that_is_wanted_and_it_has_a_folder(tmp_path: Path) -> None:
    assert_raises(ValueError, "cache_shared=True needs cache", make_access, cache_shared=True)
    assert_raises(TypeError, "cache_shared", make_access, cache="x", cache_shared="yes")
    assert read_remote_arguments(None, tmp_path, None, True)["cache_shared"]
    assert not read_remote_arguments(None, tmp_path, None, False)["cache_shared"]
    assert_raises(typer.BadParameter, "cache_shared=True needs cache", read_remote_arguments, None, None, None, True)


CHANGE_AS_ANOTHER_USER = textwrap.dedent("""
    import os, sys
    from shardio.storage.copies import CachedCopy
    os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
    copy = CachedCopy(path=sys.argv[2], size=int(sys.argv[3]), is_shared=True)
    (found,) = copy.read([0], [copy.size])
    copy.unmark(0, copy.size)
    with copy.adding(0, copy.size) as addition:
        addition.write(0, memoryview(found[::-1]))
        addition.mark()
    copy.touch()
""")


@as_root
def test_users_who_share_a_cache_read_and_fill_the_copies_of_each_other(location: Location) -> None:
    with tempfile.TemporaryDirectory() as name:  # Others cannot reach the folders of pytest.
        cache = Path(name)
        cache.chmod(0o2777)
        assert read(location, cache, shared=True) == ORIGINAL
        (copy,) = cache.glob(f"*{COPY_SUFFIX}")
        command = [sys.executable, "-c", CHANGE_AS_ANOTHER_USER, str(OTHER_USER), str(copy), str(len(ORIGINAL))]
        subprocess.run(command, check=True)
        assert read(location, cache, shared=True) == ORIGINAL[::-1]
