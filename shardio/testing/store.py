"""Conformance tests of a store. Each storage backend passes :class:`StoreTests`.

The tests need the packages ``pytest`` and ``hypothesis``.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray

from shardio.errors import LocationError
from shardio.storage import Location, ReplacedError, StoredFile

CONTENT = np.random.default_rng(0).bytes(300_000)

KEYS = ["a", "b/c/d/e.tar", "ü/日本語 😀.tar", "a+b & c?d=e#f%20.tar", "'\"$\\*[].tar", "x" * 200, "{0..3}"]

NOT_THERE = (FileNotFoundError, NotADirectoryError)

ACCESS: Sequence[Callable[[Location], object]] = (Location.stat, Location.open, Location.read_whole)

READS: dict[str, Callable[[StoredFile, int, int], object]] = {
    "read": lambda file, start, stop: file.read(start, stop),
    "read_many": lambda file, start, stop: file.read_many(np.array([0, start]), np.array([9, stop])),
    "read_into": lambda file, start, stop: file.read_into([start], [memoryview(bytearray(stop - start))]),
}

MakeRoot = Callable[[Path], Location]

Fill = Callable[[Mapping[str, bytes]], Location]


def put(location: Location, content: bytes = CONTENT) -> Location:
    """Write an object, and return its location."""
    with location.write_whole() as file:
        file.write(content)
    return location


class StoreTests:
    """Tests of the laws that :class:`shardio.storage.Store` and :class:`shardio.storage.StoredFile` state.

    Subclass it, and override the fixture ``make_root``. The fixture returns a function that receives an empty local
    directory, which the store may use, and returns an empty folder of the store::

        import uuid
        import pytest
        from shardio.storage import Location
        from shardio.testing.store import StoreTests

        class TestMyStore(StoreTests):
            @pytest.fixture
            def make_root(self):
                return lambda folder: Location(store=MyStore("bucket"), key=uuid.uuid4().hex)

    If the store is read-only, set ``is_read_only`` and override the fixture ``fill`` instead and, if possible,
    ``refill``. ``fill`` returns a function that creates objects without the store, and returns their folder::

        class TestZipStore(StoreTests):
            is_read_only = True

            @pytest.fixture
            def fill(self, tmp_path):
                def fill(contents):
                    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
                        for key, content in contents.items():
                            file.writestr(key, content)
                    return Location(store=ZipStore(str(tmp_path / "a.zip")), key="")

                return fill

    Attributes:
        is_read_only: Whether the store is read-only. The tests of writing are then skipped.
        keys: Keys of objects that the store must accept, relative to a folder.
        max_examples: The number of random sequences of operations for which the store is compared with a dict.
    """

    is_read_only: ClassVar[bool] = False
    keys: ClassVar[Sequence[str]] = KEYS
    max_examples: ClassVar[int] = 20

    def __init_subclass__(cls) -> None:
        if cls.is_read_only and cls.fill is StoreTests.fill:
            raise TypeError(f"{cls.__name__}.is_read_only is true: override the fixture fill")

    @pytest.fixture
    def make_root(self) -> MakeRoot:
        """Return a function that returns an empty folder of the store, given an empty local directory."""
        if self.is_read_only:
            pytest.skip("the store is read-only")
        raise NotImplementedError("override the fixture make_root")

    @pytest.fixture
    def root(self, make_root: MakeRoot, tmp_path: Path) -> Location:
        """Return an empty folder of the store."""
        return make_root(tmp_path)

    @pytest.fixture
    def refill(self) -> Fill:
        """Return a function that replaces the objects of ``fill`` in a read-only store, and returns their folder.

        If this fixture is not overridden, the test that a replaced object has a different version is skipped.
        """
        if self.is_read_only:
            pytest.skip("the fixture refill is not overridden")
        return lambda contents: pytest.fail("this store can write")

    @pytest.fixture
    def fill(self, root: Location) -> Fill:
        """Return a function that puts objects into an empty folder of the store, given their contents by key.

        The function returns the folder. A test calls it once.
        """

        def fill(contents: Mapping[str, bytes]) -> Location:
            for key, content in contents.items():
                put(root / key, content)
            return root

        return fill

    def test_what_was_written_is_read(self, fill: Fill) -> None:
        root = fill({f"{number}/{key}": CONTENT for number, key in enumerate(self.keys)} | {"empty": b""})
        for number, key in enumerate(self.keys):
            here = root / str(number)
            location = here / key
            assert location.exists()
            assert (type(found := location.read_whole()), found) == (bytes, CONTENT)
            assert location.stat().size == len(CONTENT)
            with closing(location.open()) as file:
                assert file.location == location
                assert (file.size, file.version) == (len(CONTENT), location.stat().version)
                assert file.is_local == root.store.is_local
                assert (type(found := file.read(0, file.size)), found) == (bytes, CONTENT)
            assert list(here.walk()) == [location.key]
        empty = root / "empty"
        assert (empty.exists(), empty.stat().size, empty.read_whole()) == (True, 0, b"")
        with closing(empty.open()) as file:
            assert file.read(0, 0) == b""

    def test_a_missing_object_is_not_found_and_the_error_names_it(self, fill: Fill) -> None:
        root = fill({"a": CONTENT})
        for key in ["missing", "no/such/folder", "a/below/an/object", "日本語"]:
            assert not (root / key).exists()
            assert not (root / key).is_folder()
            for access in ACCESS:
                with pytest.raises(NOT_THERE if key.startswith("a/") else FileNotFoundError, match=key):
                    access(root / key)
        for key in ["missing", "no/such/folder", "a"]:
            assert ((root / key).list(), list((root / key).walk())) == ([], [])

    @pytest.mark.parametrize("access", ACCESS)
    def test_a_folder_is_not_an_object(self, fill: Fill, access: Callable[[Location], object]) -> None:
        root = fill({"folder/a": CONTENT})
        assert (root / "folder").is_folder()
        assert not (root / "folder").exists()
        assert not (root / "folder" / "a").is_folder()
        with pytest.raises((*NOT_THERE, IsADirectoryError), match="folder"):
            access(root / "folder")

    def test_a_missing_object_can_be_removed(self, root: Location) -> None:
        (root / "no" / "such").remove()
        assert root.list() == []

    def test_an_object_is_created_only_if_there_is_none(self, root: Location) -> None:
        assert (root / "a").create(b"first")
        assert not (root / "a").create(b"second")
        # Finding the same content counts as success: an earlier attempt may have written it.
        assert (root / "a").create(b"first")
        assert (root / "a").read_whole() == b"first"
        assert root.list() == ["a"]

    def test_of_those_who_create_an_object_at_the_same_time_one_succeeds(self, root: Location) -> None:
        contents = [b"%d" % i for i in range(8)]
        with ThreadPoolExecutor(len(contents)) as pool:
            are_written = list(pool.map((root / "folder" / "a").create, contents))
        assert [content for content, is_written in zip(contents, are_written, strict=True) if is_written] == [
            (root / "folder" / "a").read_whole()
        ]

    @pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
    def test_a_range_past_the_end_is_an_error_that_names_object_and_size(
        self, fill: Fill, read: Callable[[StoredFile, int, int], object]
    ) -> None:
        location = fill({"folder/ü.tar": CONTENT}) / "folder" / "ü.tar"
        with closing(location.open()) as file:
            for start in [len(CONTENT) - 5, len(CONTENT), len(CONTENT) + 10**9]:
                with pytest.raises(EOFError) as caught:
                    read(file, start, start + 10)
                message = str(caught.value)
                assert message.startswith(f"{location} ends at byte {len(CONTENT)}, but bytes ")
                assert f"to {start + 10} were requested" in message

    def test_many_ranges_equal_single_ones_in_their_order(self, fill: Fill) -> None:
        with closing((fill({"a": CONTENT}) / "a").open()) as file:
            for start, stop in [(0, 0), (0, 1), (255, 70_000), (len(CONTENT) - 1, len(CONTENT)), (len(CONTENT),) * 2]:
                assert file.read(start, stop) == CONTENT[start:stop]
            for count in [0, 1, 2, 70, 5000]:
                starts, stops = _many_ranges(count)
                expected = [CONTENT[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
                found = file.read_many(starts, stops)
                assert found == expected
                assert {*map(type, found)} <= {bytes}, "codecs accept only bytes"
                buffers = [memoryview(bytearray(len(content))) for content in expected]
                file.read_into(starts.tolist(), buffers)
                assert [bytes(buffer) for buffer in buffers] == expected
            whole = memoryview(bytearray(b"." * 40))
            file.read_into([100, 7, 8], [whole[30:40], whole[5:10], whole[10:10]])
        assert bytes(whole) == b"." * 5 + CONTENT[7:12] + b"." * 20 + CONTENT[100:110], "nothing else is written"

    def test_a_listing_is_sorted_and_marks_folders_and_a_walk_leaves_out_what_is_hidden(self, fill: Fill) -> None:
        keys = ["b/2", "b/1", "a", "b.x", ".hidden", ".git/config", "b/.cache/z", "b/c/d/deep", "Z", "é 1", "ba/c%20"]
        root = fill({key: CONTENT[:size] for size, key in enumerate(keys)})
        stats = {(root / key).key: (root / key).stat() for key in keys}
        assert [stat.size for stat in stats.values()] == list(range(len(keys)))
        assert root.list() == [".git/", ".hidden", "Z", "a", "b.x", "b/", "ba/", "é 1"]
        assert (root / "b").list() == [".cache/", "1", "2", "c/"]
        assert (root / "b" / "c").list() == ["d/"]
        visible = [key for key in keys if not any(part.startswith(".") for part in key.split("/"))]
        assert sorted(root.walk()) == sorted((root / key).key for key in visible)
        assert dict(root.walk_stats()) == {(root / key).key: stats[(root / key).key] for key in visible}
        assert sorted((root / "b").walk()) == [(root / key).key for key in ["b/1", "b/2", "b/c/d/deep"]]

    def test_a_read_only_store_refuses_writes(self, fill: Fill) -> None:
        if not self.is_read_only:
            pytest.skip("the store can write")
        root = fill({"a": CONTENT})
        for key in ("a", "b"):
            assert not (root / key).can_write()
            with pytest.raises((LocationError, OSError), match=key):
                put(root / key, b"new")
            with pytest.raises((LocationError, OSError), match=key):
                (root / key).create(b"new")
        assert [root.list(), (root / "a").read_whole()] == [["a"], CONTENT]

    def test_an_object_is_replaced_and_gets_another_version(self, root: Location) -> None:
        location = put(root / "a")
        before = location.stat()
        assert location.stat() == before
        for content in b"new and short", b"as short as t":
            put(location, content)
            assert location.read_whole() == content
            assert location.stat().version != before.version
            before = location.stat()
        assert (root / "new").can_write()

    def test_a_replaced_object_of_a_read_only_store_has_another_version(self, fill: Fill, refill: Fill) -> None:
        if not self.is_read_only:
            pytest.skip("another test replaces objects")
        before = (fill({"a": b"old", "b": b""}) / "a").stat()
        location = refill({"a": b"new", "b": b""}) / "a"
        assert location.read_whole() == b"new"
        assert location.stat().version != before.version

    def test_an_object_does_not_appear_before_it_is_whole(self, root: Location) -> None:
        location, old = root / "folder" / "a", put(root / "folder" / "old", b"old")
        with location.write_whole() as file, old.write_whole() as other:
            file.write(CONTENT[:70_000])
            file.write(CONTENT[70_000:])
            other.write(CONTENT)
            assert not location.exists()
            assert old.read_whole() == b"old"
            assert (root / "folder").list() == ["old"]
        assert location.read_whole() == old.read_whole() == CONTENT

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
    def test_a_failed_write_leaves_what_was_there(self, root: Location, error: type[BaseException]) -> None:
        old = put(root / "old", b"old")
        for location in old, root / "new":
            with pytest.raises(error), location.write_whole() as file:  # noqa: PT012  # The error interrupts a write.
                file.write(CONTENT)
                raise error
        assert old.read_whole() == b"old"
        assert root.list() == ["old"]

    def test_an_open_object_is_never_read_as_another_one(self, root: Location) -> None:
        location = put(root / "a", b"old" * 1000)
        with closing(location.open()) as file:
            assert file.read(0, 9) == b"oldoldold"
            put(location, b"new" * 1000)
            try:
                assert file.read(300, 309) == b"oldoldold"
            except ReplacedError as error:
                assert str(location) in str(error)  # noqa: PT017  # Both outcomes are right.

    def test_locations_are_values_and_objects_have_identities(self, fill: Fill) -> None:
        root = fill({"ü/a.tar": CONTENT, "b": CONTENT})
        first, second = root / "ü" / "a.tar", root / "b"
        assert (first.name, first.folder, first.folder.folder) == ("a.tar", root / "ü", root)
        assert str(first) == f"{str(root).rstrip('/')}/ü/a.tar"
        assert first.stat().identity == first.stat().identity != second.stat().identity
        assert first.resolve() == first.resolve() != second.resolve()
        copy: Location = pickle.loads(pickle.dumps(first))
        assert copy == first == root / "ü" / "a.tar"
        assert len({copy, first, root}) == 2
        assert copy.read_whole() == CONTENT

    def test_threads_share_an_open_object(self, fill: Fill) -> None:
        with closing((fill({"a": CONTENT}) / "a").open()) as file, ThreadPoolExecutor(8) as pool:

            def read_randomly(seed: int) -> bool:
                generator = random.Random(seed)
                ranges = [sorted(generator.choices(range(len(CONTENT) + 1), k=2)) for _ in range(30)]
                return all(file.read(start, stop) == CONTENT[start:stop] for start, stop in ranges)

            assert all(pool.map(read_randomly, range(16)))

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    def test_a_fork_shares_an_open_object(self, fill: Fill) -> None:
        def reads(file: StoredFile, seed: int) -> bool:
            starts = random.Random(seed).choices(range(len(CONTENT) - 9), k=30_000 if file.is_local else 300)
            return all(file.read(start, start + 9) == CONTENT[start : start + 9] for start in starts)

        with closing((fill({"a": CONTENT}) / "a").open()) as file:
            if not (child := os.fork()):
                signal.alarm(60)
                os._exit(not reads(file, 1))
            while not (ended := os.waitpid(child, os.WNOHANG))[0]:
                assert reads(file, 2), "reads in the child do not affect reads in the parent"
            assert ended[1] == 0

    def test_threads_that_write_one_object_do_not_mix(self, root: Location) -> None:
        contents, barrier = [bytes([letter]) * 100_000 for letter in b"abcdefgh"], threading.Barrier(8)

        def write(content: bytes) -> None:
            barrier.wait()
            for _ in range(5):
                put(root / "folder" / "a", content)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, contents))
        assert (root / "folder" / "a").read_whole() in contents
        assert (root / "folder").list() == ["a"]

    def test_a_store_is_a_dict(self, make_root: MakeRoot) -> None:
        """Run the state machine, whose rules and invariant make the assertions."""
        machine = type("Machine", (_StoreMachine,), {"make_root": staticmethod(make_root)})
        run_state_machine_as_test(machine, settings=settings(max_examples=self.max_examples, stateful_step_count=25))


def _many_ranges(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ranges in random order: short and long ones, empty ones, equal ones, and some that overlap."""
    generator = np.random.default_rng(count)
    starts = generator.integers(0, len(CONTENT) + 1, count)
    lengths = generator.choice([0, 1, 100, 5000, 60_000], count, p=[0.1, 0.4, 0.3, 0.19, 0.01])
    return np.repeat(starts, 2)[:count], np.minimum(np.repeat(starts + lengths, 2)[:count], len(CONTENT))


_KEYS = st.sampled_from(["a", "b.x", "f/a", "f/b", "f/g/a", "fa/a", "é/ü", ".h", "f/.h/a"])
"""No key is a folder of another key, because a file system cannot hold both."""

_CONTENTS = st.binary(max_size=50) | st.integers(0, 200_000).map(bytes)


class _StoreMachine(RuleBasedStateMachine):
    make_root: MakeRoot

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.root = self.make_root(Path(self.directory.name))
        self.model = dict[str, bytes]()
        self.open = list[tuple[StoredFile, bytes]]()

    def teardown(self) -> None:
        for file, _ in self.open:
            file.close()
        self.directory.cleanup()

    @rule(key=_KEYS, content=_CONTENTS)
    def write(self, key: str, content: bytes) -> None:
        with (self.root / key).write_whole() as file:
            file.write(content[:10])
            file.write(content[10:])
        self.model[key] = content

    @rule(key=_KEYS, content=_CONTENTS)
    def fail_to_write(self, key: str, content: bytes) -> None:
        with suppress(ZeroDivisionError), (self.root / key).write_whole() as file:
            file.write(content)
            raise ZeroDivisionError

    @rule(key=_KEYS)
    def remove(self, key: str) -> None:
        (self.root / key).remove()
        self.model.pop(key, None)

    @rule(key=_KEYS)
    def read(self, key: str) -> None:
        if key in self.model:
            assert (self.root / key).read_whole() == self.model[key]
        else:
            with pytest.raises(NOT_THERE):
                (self.root / key).read_whole()

    @rule(key=_KEYS)
    def open_object(self, key: str) -> None:
        if key in self.model:
            self.open.append(((self.root / key).open(), self.model[key]))

    @rule(data=st.data())
    def read_open_object(self, data: st.DataObject) -> None:
        if not self.open:
            return
        file, content = data.draw(st.sampled_from(self.open))
        assert file.size == len(content)
        bounds = st.integers(0, len(content))
        ranges = np.array(data.draw(st.lists(st.tuples(bounds, bounds).map(sorted), max_size=9)), np.int64)
        starts, stops = ranges.reshape(-1, 2).T
        # A read that raises no error returns the content that the object had when it was opened.
        with suppress(ReplacedError, FileNotFoundError):
            expected = [content[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            assert file.read_many(starts, stops) == expected

    @invariant()
    def the_store_holds_what_the_dict_holds(self) -> None:
        visible = {key for key in self.model if not any(part.startswith(".") for part in key.split("/"))}
        assert sorted(self.root.walk()) == sorted((self.root / key).key for key in visible)
        for key, content in self.model.items():
            assert (self.root / key).stat().size == len(content)
        for folder in ["", "f", "f/g", "é", "f/.h"]:
            location, prefix = (self.root / folder, f"{folder}/") if folder else (self.root, "")
            below = [key.removeprefix(prefix) for key in self.model if key.startswith(prefix)]
            names = {head + slash for head, slash, _ in (key.partition("/") for key in below)}
            listed = location.list()
            assert listed == sorted(set(listed))
            assert names <= set(listed)
            for name in set(listed) - names:  # Some stores keep empty folders.
                assert name.endswith("/")
                assert list((location / name.rstrip("/")).walk()) == []
