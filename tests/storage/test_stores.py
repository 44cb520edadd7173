"""All storage backends pass the conformance suite. Other tests cover local files, and their links and descriptors."""

from __future__ import annotations

import mmap
import os
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardio.errors import FormatError
from shardio.reading import SampleReader
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, open_table, write_manifest, write_shard
from shardio.storage import (
    PIECE,
    Location,
    RemoteAccess,
    ReplacedError,
    find_url,
    make_access,
    parse_location,
    read_pieces,
    walk_files,
)
from shardio.storage.local import LIMITS, open_files
from shardio.storage.store import read_runs
from shardio.testing.store import Fill, MakeRoot, StoreTests
from tests.files import find_open_files
from tests.memory_store import MemoryStore
from tests.raising import assert_raises
from tests.servers.server import Server
from tests.servers.stores import FakeHub
from tests.storage.conftest import at_server, in_memory, put
from tests.tars import write_tar


class TestLocal(StoreTests):
    @pytest.fixture
    def make_root(self) -> MakeRoot:
        return parse_location


class TestObjectStore(StoreTests):
    @pytest.fixture
    def make_root(self) -> MakeRoot:
        return lambda folder: in_memory(folder.name)


class TestCachedStore(StoreTests):
    max_examples = 8

    @pytest.fixture
    def make_root(self) -> MakeRoot:
        return lambda folder: in_memory(folder.name, make_access(cache=folder / "cache", cache_size="100MB"))


class TestMemoryOfTests(StoreTests):
    @pytest.fixture
    def make_root(self) -> MakeRoot:
        store = MemoryStore()
        return lambda folder: store.at(f"{uuid.uuid4().hex}/{folder.name}")


class TestMirror(StoreTests):
    @pytest.fixture
    def make_root(self, mirrored: MakeRoot) -> MakeRoot:
        return mirrored


class TestHub(StoreTests):
    keys = tuple(key.replace("[]", "") for key in StoreTests.keys)  # The Hub refuses these characters.
    is_read_only = True

    @pytest.fixture
    def fill(self, fake_hub: FakeHub, tmp_path: Path) -> Fill:
        name = uuid.uuid4().hex

        def fill(contents: Mapping[str, bytes]) -> Location:
            for key, content in contents.items():
                put(parse_location(tmp_path / "files" / key), content)
            revision = uuid.uuid4().hex
            fake_hub.commit(name, tmp_path / "files", revision=revision)
            return at_server(fake_hub.server, f"{name}@{revision}")

        return fill

    @pytest.fixture
    def refill(self, fill: Fill) -> Fill:
        return fill


@pytest.mark.slow
class TestServers(StoreTests):
    keys = tuple(key.replace("\\", "") for key in StoreTests.keys)  # SeaweedFS and Azurite convert backslashes.
    max_examples = 1

    @pytest.fixture(params=["seaweedfs_server", "fake_gcs_server", "azurite_server"])
    def make_root(self, request: pytest.FixtureRequest) -> MakeRoot:
        server: Server = request.getfixturevalue(request.param)
        return lambda folder: at_server(server, f"{uuid.uuid4().hex}/{folder.name}")


SAMPLES = [Sample(key=f"ü/{i}", fields={"cls": b"%d" % i, "jpg": bytes([i]) * 1000 * i}, origin="") for i in range(40)]
EXPECTED = [(sample.key, dict(sample.fields)) for sample in SAMPLES]


@pytest.fixture(params=["local", "memory", "cached"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, RemoteAccess]:
    access = make_access(cache=tmp_path / "cache") if request.param == "cached" else RemoteAccess()
    return str(tmp_path / "root" if request.param == "local" else in_memory("root")), access


def read_all(source: str | list[str | Path], access: RemoteAccess) -> list[tuple[str, dict[str, bytes]]]:
    table = open_table(source, access)
    samples = SampleReader(table).read(np.arange(table.manifest.num_samples), ["cls", "jpg"])
    return [(sample.key, dict(sample.fields)) for sample in samples]


def test_a_packed_dataset_is_read_from_any_store(place: tuple[str, RemoteAccess]) -> None:
    name, access = place
    root = parse_location(name, access)
    shards = [write_shard(root / f"shard-{i:06d}.tar", SAMPLES[i * 20 : i * 20 + 20])[0] for i in range(2)]
    write_manifest(root / MANIFEST_NAME, Manifest(shards=tuple(shards), fields=("cls", "jpg")))
    for source in (name, f"{name}/{MANIFEST_NAME}", f"{name}/shard-{{000000..000001}}.tar"):
        assert read_all(source, access) == EXPECTED
    (root / MANIFEST_NAME).remove()
    assert_raises(FormatError, r"root holds shards .*\(2, .* but no shardio\.json", open_table, name, access)


@pytest.mark.filterwarnings("ignore:the members of some samples")
@pytest.mark.parametrize("is_adjacent", [True, False])
def test_foreign_tars_are_indexed_anywhere(place: tuple[str, RemoteAccess], tmp_path: Path, is_adjacent: bool) -> None:
    name, access = place
    root = parse_location(name, access)
    members = [(f"{key}.{field}", content) for key, fields in EXPECTED for field, content in fields.items()]
    write_tar(tmp_path / "x", members if is_adjacent else members[1::2] + members[::2])
    for _ in range(2):  # In the second pass, the index exists.
        put(root / "a.tar", (tmp_path / "x").read_bytes())
        assert read_all(name, access) == read_all([f"{name}/a.tar"], access) == EXPECTED
    assert root.list() == ["a.tar", "a.tar.idx"]
    assert_raises(FormatError, r"a\.tar is named twice", open_table, [f"{name}/a.tar", f"{name}/a.tar"], access)


@pytest.fixture
def file(tmp_path: Path) -> Location:
    (tmp_path / "file").write_bytes(b"0123456789")
    return parse_location(tmp_path / "file")


@pytest.mark.parametrize("name", ["pread", "preadv"])
def test_short_reads_are_completed(file: Location, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    read: Callable[..., object] = getattr(os, name)

    def read_few(descriptor: int, what: int | list[memoryview], start: int) -> object:
        few = min(what, 3) if isinstance(what, int) else [what[0][:3]]
        return read(descriptor, few, start)

    monkeypatch.setattr(os, name, read_few)
    buffer = bytearray(8)
    with closing(file.open()) as opened:
        opened.read_into([1], [memoryview(buffer)])
        assert opened.read(1, 9) == buffer == b"12345678"


def test_closing_or_forgetting_a_file_frees_its_descriptor(file: Location, tmp_path: Path) -> None:
    before = find_open_files()
    opened = file.open()
    assert len(find_open_files() - before) == 1
    opened.close()
    opened.close()
    assert find_open_files() <= before
    for _ in range(5):
        file.open()
    assert_raises(IsADirectoryError, r"Is a directory: .*test_closing_or", parse_location(tmp_path).open)
    assert find_open_files() <= before


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null")], ids=["pipe", "device"])
def test_what_is_not_a_regular_file_does_not_exist(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """Reading a pipe could block forever."""
    make(tmp_path / "other")
    location = parse_location(tmp_path / "other")
    before = find_open_files()
    assert not location.exists()
    for access in location.open, location.stat:
        assert_raises(FileNotFoundError, r"Not a regular file: .*other", access)
    assert find_open_files() <= before


def close_descriptors() -> None:
    open_files()._shrink(0)


def test_a_file_is_opened_again_when_it_is_needed_unless_it_changed(file: Location) -> None:
    with closing(file.open()) as opened:
        close_descriptors()
        assert opened.read(2, 4) == b"23"
        Path(file.key).write_bytes(b"longer than before")
        close_descriptors()
        with pytest.raises(ReplacedError, match=r"file changed while it was in use: expected 10 bytes .* got 18 bytes"):
            opened.read(2, 4)


def test_a_descriptor_is_kept_until_its_file_is_known(file: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    fstat = os.fstat

    def close_and_fstat(descriptor: int) -> os.stat_result:
        close_descriptors()
        return fstat(descriptor)

    monkeypatch.setattr(os, "fstat", close_and_fstat)
    with closing(file.open()) as opened:
        assert opened.size == 10


def test_links_have_the_identity_of_their_file(file: Location) -> None:
    path = Path(file.key)
    (path.parent / "link").symlink_to(path.name)
    os.link(path, path.parent / "hard")
    for name in "link", "hard":
        assert (file.folder / name).stat() == file.stat()
    assert (file.folder / "link").resolve() == file.resolve()


def test_a_walk_is_sorted_within_each_directory_and_follows_links(tmp_path: Path) -> None:
    for name in ["b/2", "b/1", "a", "b.x", ".hidden", "b/.cache/z", "b/c/d/deep", "Z"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "empty").mkdir()
    for name in "loop", "missing":  # Broken links do not hide the other files.
        (tmp_path / name).symlink_to(name if name == "loop" else "nothing")
    (tmp_path / "c").symlink_to(tmp_path / "b")
    found = [str(path.relative_to(tmp_path)) for path in walk_files(tmp_path)]
    expected = ["Z", "a", "b/1", "b/2", "b/c/d/deep", "b.x", "c/1", "c/2", "c/c/d/deep", "loop", "missing"]
    assert (found, parse_location(tmp_path / "b").list()) == (expected, [".cache/", "1", "2", "c/"])
    assert parse_location(tmp_path).list()[-2:] == ["loop", "missing"]
    (tmp_path / "b" / "circle").symlink_to(tmp_path)
    with pytest.raises(OSError, match="b/circle is a symbolic link to a directory that contains it"):
        list(walk_files(tmp_path))


# Paths


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("zip:///tmp/a", "zip:///tmp/a"),
        ("zip://tmp/a", "zip://tmp/a"),
        ("file:///tmp/a", "file:///tmp/a"),
        ("S3:///bucket/a", "S3://bucket/a"),
        (Path("https://server/a"), "https://server/a"),
        (Path("zip:///tmp/a"), "zip://tmp/a"),
        ("c:/a", None),
        ("/tmp/a", None),
    ],
)
def test_a_third_slash_is_kept_unless_the_url_needs_a_host(name: str | Path, url: str | None) -> None:
    assert find_url(name) == url


def test_paths_are_those_of_their_directory_in_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder" / "run:" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "folder")
    names: list[str | Path] = ["a", "./b//c/", "../d", Path("e")]
    expected = ["folder/a", "folder/b/c", "d", "folder/e"]
    assert [str(parse_location(name)) for name in names] == [f"{tmp_path}/{name}" for name in expected]
    assert parse_location("run:/a").is_folder(), "the path only looks like a URL"
    path = tmp_path / "d" / os.fsdecode(b"\xff.tar")
    path.parent.mkdir()
    path.write_bytes(b"1")
    assert (parse_location(path).read_whole(), parse_location(path.parent).list()) == (b"1", [path.name])
    for name in "", "a\0b":
        assert_raises(ValueError, "the path", parse_location, name)


# Ranges and pieces

MAX_GAP, MAX_SMALL, MAX_RUN = LIMITS.max_gap, LIMITS.max_small, LIMITS.max_run
RUNS_SIZE = 3 * MAX_RUN
RUN_CONTENT = np.random.default_rng(0).bytes(RUNS_SIZE)


def read(ranges: list[tuple[int, int]]) -> tuple[list[bytes], list[int]]:
    starts, stops = (np.array([each[side] for each in ranges], dtype=np.int64) for side in (0, 1))
    sizes = list[int]()

    def count_and_read(starts: Sequence[int], stops: Sequence[int]) -> list[bytes]:
        sizes.extend(stop - start for start, stop in zip(starts, stops, strict=True))
        return [RUN_CONTENT[start:stop] for start, stop in zip(starts, stops, strict=True)]

    return read_runs(count_and_read, starts, stops, LIMITS), sizes


lengths = st.sampled_from([0, 1, 100, 1024, MAX_SMALL, MAX_SMALL + 1, 100_000])


@given(st.lists(st.tuples(st.integers(0, RUNS_SIZE), lengths), max_size=60))
def test_any_ranges_in_any_order_are_read(offsets: list[tuple[int, int]]) -> None:
    ranges = [(start, min(start + length, RUNS_SIZE)) for start, length in offsets]
    assert read(ranges)[0] == [RUN_CONTENT[start:stop] for start, stop in ranges]


def test_neighbors_are_read_by_one_call_and_large_ranges_distant_ones_and_long_runs_apart() -> None:
    neighbors = [(i * 1536, i * 1536 + 1024) for i in range(512)]
    assert read(neighbors)[1] == read(neighbors[::-1])[1] == [511 * 1536 + 1024]
    assert read([(0, MAX_SMALL + 1), (MAX_SMALL + 1, MAX_SMALL + 2)])[1] == [MAX_SMALL + 1, 1]
    assert read([(0, 10), (10 + MAX_GAP, 20 + MAX_GAP)])[1] == [20 + MAX_GAP]
    assert read([(0, 10), (11 + MAX_GAP, 21 + MAX_GAP)])[1] == [10, 10]
    sizes = read([(start, start + 1024) for start in range(0, RUNS_SIZE, 1024)])[1]
    assert len(sizes) == 3
    assert max(sizes) <= MAX_RUN + MAX_SMALL
    assert sum(sizes) == RUNS_SIZE


@pytest.mark.parametrize("size", [0, 999, 1000, 2**17, 2 * PIECE + 5])
def test_pieces_joined_are_the_file_and_large_ones_begin_where_a_page_does(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    for num_bytes, start in [(999, 0), (999, 1000), (2**17, 1000), (PIECE, 0)]:
        pieces, addresses = list[bytes](), set[int]()
        with closing(parse_location(tmp_path / "file").open()) as file:
            for piece in read_pieces(file, start, num_bytes):
                pieces.append(bytes(piece))
                addresses.add(np.frombuffer(piece, np.uint8).ctypes.data)
        assert b"".join(pieces) == content[start:]
        assert all(len(piece) == num_bytes for piece in pieces[:-1])
        assert min(size, num_bytes) < PIECE or all(address % mmap.PAGESIZE == 0 for address in addresses)
