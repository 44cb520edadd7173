"""The laws of a Store. Every backend passes this suite: tests/storage/conftest.py lists them."""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from numpy.typing import NDArray

from shardio.storage import Location, ReplacedError, StoredFile

CONTENT = np.random.default_rng(0).bytes(300_000)
KEYS = ["a", "a.tar", "b/c/d/e.tar", "ü/日本語 😀.tar", "a+b & c?d=e#f%20.tar", "'\"$\\*[].tar", "x" * 200, "{0..3}"]
NO_BACKSLASHES = ("s3://", "az://")
"""SeaweedFS and Azurite store a backslash as a slash."""

NOT_THERE = (FileNotFoundError, NotADirectoryError)


def put(location: Location, content: bytes = CONTENT) -> Location:
    with location.write_whole() as file:
        file.write(content)
    return location


def integers(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


# What an object is


@pytest.mark.parametrize("key", KEYS)
def test_what_was_written_is_read(root: Location, key: str) -> None:
    if key == KEYS[5] and str(root).startswith(NO_BACKSLASHES):
        key = key.replace("\\", "")
    location = put(root / key)
    assert location.exists()
    assert location.read_whole() == CONTENT
    assert location.stat().size == len(CONTENT)
    with closing(location.open()) as file:
        assert file.location == location
        assert (file.size, file.version) == (len(CONTENT), location.stat().version)
        assert file.read(0, file.size) == CONTENT
    assert list(root.walk()) == [location.key]


def test_content_is_written_in_pieces(root: Location) -> None:
    with (root / "a").write_whole() as file:
        for start in range(0, len(CONTENT), 70_000):
            file.write(CONTENT[start : start + 70_000])
    assert (root / "a").read_whole() == CONTENT


def test_an_empty_object_exists(root: Location) -> None:
    location = put(root / "a", b"")
    assert (location.exists(), location.stat().size, location.read_whole()) == (True, 0, b"")
    with closing(location.open()) as file:
        assert file.read(0, 0) == b""


ACCESS: dict[str, Callable[[Location], object]] = {
    "stat": Location.stat,
    "open": Location.open,
    "read_whole": Location.read_whole,
}


@pytest.mark.parametrize("access", ACCESS.values(), ids=ACCESS.keys())
@pytest.mark.parametrize("key", ["missing", "no/such/folder", "a/below/an/object", "日本語"])
def test_a_missing_object_is_not_found_and_the_error_names_it(
    root: Location, key: str, access: Callable[[Location], object]
) -> None:
    put(root / "a")
    assert not (root / key).exists()
    assert not (root / key).is_folder()
    with pytest.raises(NOT_THERE, match=key):
        access(root / key)


@pytest.mark.parametrize("access", ACCESS.values(), ids=ACCESS.keys())
def test_a_folder_is_not_an_object(root: Location, access: Callable[[Location], object]) -> None:
    put(root / "folder" / "a")
    assert (root / "folder").is_folder()
    assert not (root / "folder").exists()
    assert not (root / "folder" / "a").is_folder()
    with pytest.raises((*NOT_THERE, IsADirectoryError), match="folder"):
        access(root / "folder")


def test_an_object_is_created_only_if_there_is_none(root: Location) -> None:
    assert (root / "a").create(b"first")
    assert not (root / "a").create(b"second")
    assert (root / "a").create(b"first")  # It has this content: an earlier attempt may have written it.
    assert (root / "a").read_whole() == b"first"
    assert root.list() == ["a"]


def test_of_those_who_create_an_object_at_the_same_time_one_succeeds(root: Location) -> None:
    contents = [b"%d" % i for i in range(8)]
    with ThreadPoolExecutor(len(contents)) as pool:
        are_written = list(pool.map((root / "folder" / "a").create, contents))
    assert [content for content, is_written in zip(contents, are_written, strict=True) if is_written] == [
        (root / "folder" / "a").read_whole()
    ]


def test_a_removed_object_is_missing(root: Location) -> None:
    location = put(root / "folder" / "a")
    location.remove()
    location.remove()
    assert not location.exists()
    assert list(root.walk()) == []
    (root / "no" / "such").remove()


# Ranges

RANGES = [(0, 0), (0, 1), (5, 6), (255, 70_000), (0, len(CONTENT)), (len(CONTENT) - 1, len(CONTENT))]


@pytest.mark.parametrize(("start", "stop"), [*RANGES, (17, 17), (len(CONTENT), len(CONTENT))])
def test_a_range_is_half_open(root: Location, start: int, stop: int) -> None:
    with closing(put(root / "a").open()) as file:
        assert file.read(start, stop) == CONTENT[start:stop]


READS: dict[str, Callable[[StoredFile, int, int], object]] = {
    "read": lambda file, start, stop: file.read(start, stop),
    "read_many": lambda file, start, stop: file.read_many(integers(0, start), integers(9, stop)),
    "read_into": lambda file, start, stop: file.read_into([start], [memoryview(bytearray(stop - start))]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("start", [len(CONTENT) - 5, len(CONTENT), len(CONTENT) + 10**9])
def test_a_range_past_the_end_is_an_error_that_names_object_and_size(
    root: Location, start: int, read: Callable[[StoredFile, int, int], object]
) -> None:
    location = put(root / "folder" / "ü.tar")
    with closing(location.open()) as file, pytest.raises(EOFError) as caught:
        read(file, start, start + 10)
    message = str(caught.value)
    assert message.startswith(f"{location} ends at byte {len(CONTENT)}, but bytes ")
    assert f"to {start + 10} were requested" in message


def many_ranges(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ranges in random order: short and long ones, empty ones, equal ones, and some that overlap."""
    generator = np.random.default_rng(count)
    starts = generator.integers(0, len(CONTENT) + 1, count)
    lengths = generator.choice([0, 1, 100, 5000, 60_000], count, p=[0.1, 0.4, 0.3, 0.19, 0.01])
    return np.repeat(starts, 2)[:count], np.minimum(np.repeat(starts + lengths, 2)[:count], len(CONTENT))


@pytest.mark.parametrize("count", [0, 1, 2, 70, 5000])
def test_many_ranges_equal_single_ones_in_their_order(root: Location, count: int) -> None:
    starts, stops = many_ranges(count)
    expected = [CONTENT[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    with closing(put(root / "a").open()) as file:
        assert file.read_many(starts, stops) == expected
        buffers = [memoryview(bytearray(len(content))) for content in expected]
        file.read_into(starts.tolist(), buffers)
        assert [bytes(buffer) for buffer in buffers] == expected


def test_buffers_may_be_parts_of_one_and_nothing_else_of_it_is_written(root: Location) -> None:
    whole = memoryview(bytearray(b"." * 40))
    with closing(put(root / "a").open()) as file:
        file.read_into([100, 7, 8], [whole[30:40], whole[5:10], whole[10:10]])
    assert bytes(whole) == b"." * 5 + CONTENT[7:12] + b"." * 20 + CONTENT[100:110]


# Folders


def test_a_listing_is_sorted_and_marks_folders(root: Location) -> None:
    for key in ["b/2", "b/1", "a", "b.x", ".hidden", "b/c/d/deep", "Z", "é", "ba/1"]:
        put(root / key, b"")
    assert root.list() == [".hidden", "Z", "a", "b.x", "b/", "ba/", "é"]
    assert (root / "b").list() == ["1", "2", "c/"]
    assert (root / "b" / "c").list() == ["d/"]


def test_a_walk_finds_all_objects_below_a_folder_that_are_not_hidden(root: Location) -> None:
    for key in ["b/2", "b/1", "a", ".hidden", ".git/config", "b/.cache/z", "b/c/d/deep", "ba/1"]:
        put(root / key, b"")
    assert sorted(root.walk()) == [(root / key).key for key in ["a", "b/1", "b/2", "b/c/d/deep", "ba/1"]]
    assert sorted((root / "b").walk()) == [(root / key).key for key in ["b/1", "b/2", "b/c/d/deep"]]


def test_a_walk_knows_what_each_object_is(root: Location) -> None:
    objects = {(root / key).key: put(root / key, CONTENT[:size]) for size, key in enumerate(["a", "b/ü 1", "b/c%20"])}
    assert dict(root.walk_stats()) == {key: location.stat() for key, location in objects.items()}


@pytest.mark.parametrize("key", ["missing", "no/such/folder", "a"])
def test_what_is_not_a_folder_is_empty(root: Location, key: str) -> None:
    put(root / "a")
    assert ((root / key).list(), list((root / key).walk())) == ([], [])


def test_locations_are_named_from_their_folders(root: Location) -> None:
    location = root / "folder" / "a.tar"
    assert (location.name, location.folder, location.folder.folder) == ("a.tar", root / "folder", root)
    assert str(location) == f"{root}/folder/a.tar"


# Writes


def test_an_object_is_replaced_and_gets_another_version(root: Location) -> None:
    location = put(root / "a")
    before = location.stat()
    assert location.stat() == before
    for content in b"new and short", b"as short as t":
        put(location, content)
        assert location.read_whole() == content
        assert location.stat().version != before.version
        before = location.stat()


def test_an_object_does_not_appear_before_it_is_whole(root: Location) -> None:
    location, old = root / "folder" / "a", put(root / "folder" / "old", b"old")
    with location.write_whole() as file, old.write_whole() as other:
        file.write(CONTENT)
        other.write(CONTENT)
        assert not location.exists()
        assert old.read_whole() == b"old"
        assert (root / "folder").list() == ["old"]
    assert location.read_whole() == old.read_whole() == CONTENT


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_what_was_there(root: Location, error: type[BaseException]) -> None:
    old = put(root / "old", b"old")
    for location in old, root / "new":
        with pytest.raises(error), location.write_whole() as file:  # noqa: PT012  # The write fails in between.
            file.write(CONTENT)
            raise error
    assert old.read_whole() == b"old"
    assert root.list() == ["old"]


def test_an_open_object_is_never_read_as_another_one(root: Location) -> None:
    location = put(root / "a", b"old" * 1000)
    with closing(location.open()) as file:
        assert file.read(0, 9) == b"oldoldold"
        put(location, b"new" * 1000)
        try:
            assert file.read(300, 309) == b"oldoldold"
        except ReplacedError as error:
            assert str(location) in str(error)  # noqa: PT017  # Both are right.


def test_this_process_may_write_here(root: Location) -> None:
    assert (root / "new").can_write()


# Identity


def test_one_object_has_one_identity(root: Location) -> None:
    first, second = put(root / "a"), put(root / "b")
    assert first.stat().identity == first.stat().identity != second.stat().identity
    assert first.resolve() == first.resolve() != second.resolve()


def test_locations_are_values(root: Location) -> None:
    location = put(root / "ü" / "a.tar")
    copy: Location = pickle.loads(pickle.dumps(location))
    assert copy == location == root / "ü" / "a.tar"
    assert len({copy, location, root}) == 2
    assert copy.read_whole() == CONTENT


# Threads


def test_threads_share_an_open_object(root: Location) -> None:
    with closing(put(root / "a").open()) as file, ThreadPoolExecutor(8) as pool:

        def read_randomly(seed: int) -> bool:
            generator = random.Random(seed)
            ranges = [sorted(generator.choices(range(len(CONTENT) + 1), k=2)) for _ in range(30)]
            return all(file.read(start, stop) == CONTENT[start:stop] for start, stop in ranges)

        assert all(pool.map(read_randomly, range(16)))


def test_threads_that_write_one_object_do_not_mix(root: Location) -> None:
    contents, barrier = [bytes([letter]) * 100_000 for letter in b"abcdefgh"], threading.Barrier(8)

    def write(content: bytes) -> None:
        barrier.wait()
        for _ in range(5):
            put(root / "folder" / "a", content)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, contents))
    assert (root / "folder" / "a").read_whole() in contents
    assert (root / "folder").list() == ["a"]
