"""The laws of a store. Every backend passes this suite: tests/storage/conftest.py lists them."""

from __future__ import annotations

import pickle
import random
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, open_table, write_manifest, write_shard
from shardio.storage import Location, ReplacedError, StoredFile
from tests.storage.conftest import BACKENDS, put as put_content
from tests.tars import write_tar

CONTENT = np.random.default_rng(0).bytes(300_000)
KEYS = ["a", "b/c/d/e.tar", "ü/日本語 😀.tar", "a+b & c?d=e#f%20.tar", "'\"$\\*[].tar", "x" * 200, "{0..3}"]
NO_BACKSLASHES = ("s3://", "az://")  # SeaweedFS and Azurite store a backslash as a slash.

NOT_THERE = (FileNotFoundError, NotADirectoryError)


def put(location: Location, content: bytes = CONTENT) -> Location:
    return put_content(location, content)


def integers(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


# What an object is


def test_what_was_written_is_read(anywhere: Location) -> None:
    for key in KEYS:
        here = anywhere / str(KEYS.index(key))
        if str(anywhere).startswith(NO_BACKSLASHES):
            key = key.replace("\\", "")
        location = put(here / key)
        assert location.exists()
        assert location.read_whole() == CONTENT
        assert location.stat().size == len(CONTENT)
        with closing(location.open()) as file:
            assert file.location == location
            assert (file.size, file.version) == (len(CONTENT), location.stat().version)
            assert file.read(0, file.size) == CONTENT
        assert list(here.walk()) == [location.key]
    empty = put(anywhere / "empty", b"")
    assert (empty.exists(), empty.stat().size, empty.read_whole()) == (True, 0, b"")
    with closing(empty.open()) as file:
        assert file.read(0, 0) == b""


ACCESS: list[Callable[[Location], object]] = [Location.stat, Location.open, Location.read_whole]


def test_a_missing_object_is_not_found_and_the_error_names_it(anywhere: Location) -> None:
    put(anywhere / "a")
    for key in ["missing", "no/such/folder", "a/below/an/object", "日本語"]:
        assert not (anywhere / key).exists()
        assert not (anywhere / key).is_folder()
        for access in ACCESS:
            with pytest.raises(NOT_THERE, match=key):
                access(anywhere / key)
    for key in ["missing", "no/such/folder", "a"]:
        assert ((anywhere / key).list(), list((anywhere / key).walk())) == ([], [])
    (anywhere / "no" / "such").remove()


@pytest.mark.parametrize("access", ACCESS)
def test_a_folder_is_not_an_object(anywhere: Location, access: Callable[[Location], object]) -> None:
    put(anywhere / "folder" / "a")
    assert (anywhere / "folder").is_folder()
    assert not (anywhere / "folder").exists()
    assert not (anywhere / "folder" / "a").is_folder()
    with pytest.raises((*NOT_THERE, IsADirectoryError), match="folder"):
        access(anywhere / "folder")


def test_an_object_is_created_only_if_there_is_none(anywhere: Location) -> None:
    assert (anywhere / "a").create(b"first")
    assert not (anywhere / "a").create(b"second")
    assert (anywhere / "a").create(b"first")  # It has this content: an earlier attempt may have written it.
    assert (anywhere / "a").read_whole() == b"first"
    assert anywhere.list() == ["a"]


def test_of_those_who_create_an_object_at_the_same_time_one_succeeds(anywhere: Location) -> None:
    contents = [b"%d" % i for i in range(8)]
    with ThreadPoolExecutor(len(contents)) as pool:
        are_written = list(pool.map((anywhere / "folder" / "a").create, contents))
    assert [content for content, is_written in zip(contents, are_written, strict=True) if is_written] == [
        (anywhere / "folder" / "a").read_whole()
    ]


# Ranges


READS: dict[str, Callable[[StoredFile, int, int], object]] = {
    "read": lambda file, start, stop: file.read(start, stop),
    "read_many": lambda file, start, stop: file.read_many(integers(0, start), integers(9, stop)),
    "read_into": lambda file, start, stop: file.read_into([start], [memoryview(bytearray(stop - start))]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_range_past_the_end_is_an_error_that_names_object_and_size(
    root: Location, read: Callable[[StoredFile, int, int], object]
) -> None:
    location = put(root / "folder" / "ü.tar")
    with closing(location.open()) as file:
        for start in [len(CONTENT) - 5, len(CONTENT), len(CONTENT) + 10**9]:
            with pytest.raises(EOFError) as caught:
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


def test_many_ranges_equal_single_ones_in_their_order(anywhere: Location) -> None:
    with closing(put(anywhere / "a").open()) as file:
        for start, stop in [(0, 0), (0, 1), (255, 70_000), (len(CONTENT) - 1, len(CONTENT)), (len(CONTENT),) * 2]:
            assert file.read(start, stop) == CONTENT[start:stop]
        for count in [0, 1, 2, 70, 5000]:
            starts, stops = many_ranges(count)
            expected = [CONTENT[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            assert file.read_many(starts, stops) == expected
            buffers = [memoryview(bytearray(len(content))) for content in expected]
            file.read_into(starts.tolist(), buffers)
            assert [bytes(buffer) for buffer in buffers] == expected
        whole = memoryview(bytearray(b"." * 40))
        file.read_into([100, 7, 8], [whole[30:40], whole[5:10], whole[10:10]])
    assert bytes(whole) == b"." * 5 + CONTENT[7:12] + b"." * 20 + CONTENT[100:110], "nothing else is written"


# Folders


def test_a_listing_is_sorted_and_marks_folders_and_a_walk_leaves_out_what_is_hidden(anywhere: Location) -> None:
    keys = ["b/2", "b/1", "a", "b.x", ".hidden", ".git/config", "b/.cache/z", "b/c/d/deep", "Z", "é 1", "ba/c%20"]
    stats = {(anywhere / key).key: put(anywhere / key, CONTENT[:size]).stat() for size, key in enumerate(keys)}
    assert anywhere.list() == [".git/", ".hidden", "Z", "a", "b.x", "b/", "ba/", "é 1"]
    assert (anywhere / "b").list() == [".cache/", "1", "2", "c/"]
    assert (anywhere / "b" / "c").list() == ["d/"]
    visible = [key for key in keys if not any(part.startswith(".") for part in key.split("/"))]
    assert sorted(anywhere.walk()) == sorted((anywhere / key).key for key in visible)
    assert dict(anywhere.walk_stats()) == {(anywhere / key).key: stats[(anywhere / key).key] for key in visible}
    assert sorted((anywhere / "b").walk()) == [(anywhere / key).key for key in ["b/1", "b/2", "b/c/d/deep"]]


# Writes


def test_an_object_is_replaced_and_gets_another_version(anywhere: Location) -> None:
    location = put(anywhere / "a")
    before = location.stat()
    assert location.stat() == before
    for content in b"new and short", b"as short as t":
        put(location, content)
        assert location.read_whole() == content
        assert location.stat().version != before.version
        before = location.stat()
    assert (anywhere / "new").can_write()


def test_an_object_does_not_appear_before_it_is_whole(anywhere: Location) -> None:
    location, old = anywhere / "folder" / "a", put(anywhere / "folder" / "old", b"old")
    with location.write_whole() as file, old.write_whole() as other:
        file.write(CONTENT[:70_000])
        file.write(CONTENT[70_000:])
        other.write(CONTENT)
        assert not location.exists()
        assert old.read_whole() == b"old"
        assert (anywhere / "folder").list() == ["old"]
    assert location.read_whole() == old.read_whole() == CONTENT


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_what_was_there(anywhere: Location, error: type[BaseException]) -> None:
    old = put(anywhere / "old", b"old")
    for location in old, anywhere / "new":
        with pytest.raises(error), location.write_whole() as file:  # noqa: PT012  # The write fails in between.
            file.write(CONTENT)
            raise error
    assert old.read_whole() == b"old"
    assert anywhere.list() == ["old"]


def test_an_open_object_is_never_read_as_another_one(anywhere: Location) -> None:
    location = put(anywhere / "a", b"old" * 1000)
    with closing(location.open()) as file:
        assert file.read(0, 9) == b"oldoldold"
        put(location, b"new" * 1000)
        try:
            assert file.read(300, 309) == b"oldoldold"
        except ReplacedError as error:
            assert str(location) in str(error)  # noqa: PT017  # Both are right.


# Identity


def test_locations_are_values_and_objects_have_identities(root: Location) -> None:
    first, second = put(root / "ü" / "a.tar"), put(root / "b")
    assert (first.name, first.folder, first.folder.folder) == ("a.tar", root / "ü", root)
    assert str(first) == f"{root}/ü/a.tar"
    assert first.stat().identity == first.stat().identity != second.stat().identity
    assert first.resolve() == first.resolve() != second.resolve()
    copy: Location = pickle.loads(pickle.dumps(first))
    assert copy == first == root / "ü" / "a.tar"
    assert len({copy, first, root}) == 2
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


# Any sequence of operations does what it does on a dict

STORE_KEYS = st.sampled_from(["a", "b.x", "f/a", "f/b", "f/g/a", "fa/a", "é/ü", ".h", "f/.h/a"])
"""None of them lies below another one: a file system cannot have both."""
CONTENTS = st.binary(max_size=50) | st.integers(0, 200_000).map(bytes)


class StoreMachine(RuleBasedStateMachine):
    backend: str

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.root = BACKENDS[self.backend](Path(self.directory.name))
        self.model = dict[str, bytes]()
        self.open = list[tuple[StoredFile, bytes]]()

    def teardown(self) -> None:
        for file, _ in self.open:
            file.close()
        self.directory.cleanup()

    @rule(key=STORE_KEYS, content=CONTENTS)
    def write(self, key: str, content: bytes) -> None:
        with (self.root / key).write_whole() as file:
            file.write(content[:10])
            file.write(content[10:])
        self.model[key] = content

    @rule(key=STORE_KEYS, content=CONTENTS)
    def fail_to_write(self, key: str, content: bytes) -> None:
        with suppress(ZeroDivisionError), (self.root / key).write_whole() as file:
            file.write(content)
            raise ZeroDivisionError

    @rule(key=STORE_KEYS)
    def remove(self, key: str) -> None:
        (self.root / key).remove()
        self.model.pop(key, None)

    @rule(key=STORE_KEYS)
    def read(self, key: str) -> None:
        if key in self.model:
            assert (self.root / key).read_whole() == self.model[key]
        else:
            with pytest.raises(NOT_THERE):
                (self.root / key).read_whole()

    @rule(key=STORE_KEYS)
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
        with suppress(ReplacedError, FileNotFoundError):  # Else it is what it was when it was opened.
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
            for name in set(listed) - names:  # Some stores keep folders that are empty.
                assert name.endswith("/")
                assert list((location / name.rstrip("/")).walk()) == []


@pytest.mark.parametrize("backend", ["local", pytest.param("memory", marks=pytest.mark.slow), "cached"])
def test_a_store_is_a_dict(backend: str) -> None:
    """The rules and the invariant of the machine assert it; the first one that fails is raised here."""
    machine = type("Machine", (StoreMachine,), {"backend": backend})
    num_examples = 8 if backend == "cached" else 20
    run_state_machine_as_test(machine, settings=settings(max_examples=num_examples, stateful_step_count=25))


# A dataset is read from any store, and by nothing but its store

SAMPLES = [Sample(key=f"ü/{i}", fields={"cls": b"%d" % i, "jpg": bytes([i]) * 1000 * i}, origin="") for i in range(40)]
EXPECTED = [(sample.key, dict(sample.fields)) for sample in SAMPLES]


@pytest.fixture
def store(root: Location, monkeypatch: pytest.MonkeyPatch) -> Location:
    """A folder of a store; names are looked up in it."""
    monkeypatch.setattr("shardio.shards.sources.parse_location", lambda name, access: root / str(name))
    return root


def read_all(source: str | list[str | Path]) -> list[tuple[str, dict[str, bytes]]]:
    table = open_table(source)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["cls", "jpg"])
    return [(sample.key, dict(sample.fields)) for sample in samples]


def test_a_packed_dataset_is_read_from_any_store(store: Location) -> None:
    shards = [write_shard(store / "data" / f"shard-{i:06d}.tar", SAMPLES[i * 20 : i * 20 + 20])[0] for i in range(2)]
    write_manifest(store / "data" / MANIFEST_NAME, Manifest(shards=tuple(shards), fields=("cls", "jpg")))
    assert read_all("data") == read_all(f"data/{MANIFEST_NAME}") == EXPECTED
    assert read_all("data/shard-{000000..000001}.tar") == EXPECTED
    (store / "data" / MANIFEST_NAME).remove()
    with pytest.raises(FormatError, match=r"data holds shards .*\(2, .* but no shardio\.json"):
        open_table("data")


@pytest.mark.filterwarnings("ignore:the members of some samples")
@pytest.mark.parametrize("is_adjacent", [True, False])
def test_tars_of_other_tools_are_indexed_in_any_store(store: Location, tmp_path: Path, is_adjacent: bool) -> None:
    members = [(f"{key}.{field}", content) for key, fields in EXPECTED for field, content in fields.items()]
    write_tar(tmp_path / "x", members if is_adjacent else members[1::2] + members[::2])
    for _ in range(2):  # The second time, the index is there.
        put(store / "data" / "a.tar", (tmp_path / "x").read_bytes())
        assert read_all("data") == read_all(["data/a.tar"]) == EXPECTED
    assert (store / "data").list() == ["a.tar", "a.tar.idx"]
    with pytest.raises(FormatError, match=r"a\.tar is named twice"):
        open_table(["data/a.tar", "data/a.tar"])
