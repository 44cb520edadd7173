"""Caches, bundles and cached copies: sizes stay within limits, bytes are right, and nothing is requested twice."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import xxhash
from hypothesis import given, settings, strategies as st

from shardio import DataLoader, ShardDataset, ShardWriter
from shardio.cli.options import read_remote_arguments
from shardio.errors import SampleError, StoreError
from shardio.storage import Location, make_access, parse_location
from shardio.storage.client import client
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
from tests.faults.proxy import FaultProxy, Script
from tests.files import OTHER_USER, as_root, mode_of, umask
from tests.raising import assert_raises
from tests.servers.server import Server
from tests.servers.web_folder import WebFolder, serve_folder
from tests.storage.conftest import at_server, in_memory, options_of, put, write_copy
from tests.tars import write_tar

CONTENT = np.random.default_rng(0).bytes(1_000_000)


def cached(location: Location, cache: Path, size: str | int = "100MB") -> Location:
    return parse_location(str(location), make_access(options_of(location), cache, size))


def bytes_in(cache: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in cache.glob(f"*{COPY_SUFFIX}"))


def bytes_requested(proxy: FaultProxy) -> int:
    return sum(each.num_bytes for each in proxy.requests() if each.method == "GET")


def test_nothing_is_fetched_twice(seaweedfs_server: Server, behind: Server, proxy: FaultProxy, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    put(at_server(seaweedfs_server, name), CONTENT)
    proxy.set(Script(latency_s=0.05))  # This makes requests overlap.
    location = cached(at_server(behind, name), tmp_path)
    with closing(location.open()) as file, ThreadPoolExecutor(16) as pool:
        starts = np.random.default_rng(1).integers(0, len(CONTENT) - 50_000, 200).tolist()
        found = list(pool.map(lambda start: file.read(start, start + 50_000), starts))
        assert found == [CONTENT[start : start + 50_000] for start in starts]
        file.prefetch([(0, len(CONTENT))])
        assert file.read(0, len(CONTENT)) == CONTENT
    assert bytes_requested(proxy) == len(CONTENT)
    with closing(location.open()) as file:
        assert file.read(0, len(CONTENT)) == CONTENT
    assert bytes_requested(proxy) == len(CONTENT)


def test_the_least_recently_used_copies_are_removed_first_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(bytes(10**7))
    folder = in_memory("x")
    for i in range(20):
        with closing(cached(put(folder / str(i), CONTENT[i:]), tmp_path, 5_000_000).open()) as file:
            assert file.read(0, file.size) == CONTENT[i:]
        assert bytes_in(tmp_path) <= 5_000_000
    assert bytes_in(tmp_path) > 2_000_000, "no more than necessary is removed"
    are_kept = [(tmp_path / name_copy((folder / str(i)).stat())).exists() for i in range(20)]
    assert are_kept == sorted(are_kept)
    assert are_kept[-1]
    assert (tmp_path / "mine.txt").stat().st_size == 10**7


def test_a_cache_that_is_too_small_for_one_object_returns_it_all_the_same(tmp_path: Path) -> None:
    with closing(cached(put(in_memory(), CONTENT), tmp_path, 100_000).open()) as file:
        for start in range(0, len(CONTENT), 100_000):
            assert file.read(start, start + 100_000) == CONTENT[start : start + 100_000]
    assert bytes_in(tmp_path) <= 100_000 + 1_100_000, "the cache exceeds its size by at most one object"


# Replaced


NUM_SAMPLES, PER_SHARD = 12, 3


def pack_texts(folder: Path, texts: dict[str, str]) -> None:
    with ShardWriter(folder, max_shard_samples=PER_SHARD) as writer:
        for key, text in texts.items():
            writer.write({"__key__": key, "txt": text})


def write_tars(folder: Path, texts: dict[str, str]) -> None:
    folder.mkdir()
    members = [(f"{key}.txt", text.encode()) for key, text in texts.items()]
    for shard in range(NUM_SAMPLES // PER_SHARD):
        write_tar(folder / f"t-{shard:06d}.tar", members[shard * PER_SHARD : (shard + 1) * PER_SHARD])


class Dated(WebFolder):
    """A server whose ETags contain the time in seconds, like those of nginx."""

    def describe(self, content: bytes) -> list[tuple[str, str]]:
        return [("ETag", f'"{(self.root / self.path[1:]).stat().st_mtime_ns // 10**9}-{len(content)}"')]


class WithoutVersions(WebFolder):
    def describe(self, content: bytes) -> list[tuple[str, str]]:
        return []


@pytest.mark.parametrize(
    ("write", "source", "server", "cache", "is_new_run"),
    [
        (pack_texts, "", Dated, None, False),
        (write_tars, "/t-{000000..000003}.tar", Dated, None, False),
        pytest.param(pack_texts, "", Dated, "cache", False, marks=pytest.mark.slow),
        pytest.param(write_tars, "/t-{000000..000003}.tar", Dated, "cache", False, marks=pytest.mark.slow),
        (pack_texts, "", WithoutVersions, "cache", False),
        (pack_texts, "", WithoutVersions, "cache", True),
    ],
)
def test_a_dataset_that_was_replaced_is_opened_again(
    write: Callable[[Path, dict[str, str]], None],
    source: str,
    server: type[WebFolder],
    cache: str | None,
    is_new_run: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))  # The user's cache holds the tars' indexes.
    arguments: dict[str, Any] = {} if cache is None else {"cache": tmp_path / cache, "cache_size": "100MB"}
    folder = tmp_path / "served" / "data"
    folder.parent.mkdir()
    with serve_folder(folder.parent, server) as (url, _):
        for round_, word in enumerate(["old", "new", "dew"]):  # The files have the same sizes in all rounds.
            texts = {f"{i:04d}": f"{word}{i:04d}" for i in range(NUM_SAMPLES)}
            shutil.rmtree(folder, ignore_errors=True)
            write(folder, texts)
            for path in folder.iterdir():
                os.utime(path, (10**9 + round_, 10**9 + round_))
            if is_new_run:
                client().close()
            dataset = ShardDataset(f"{url}/data{source}", fields=("key", "txt"), **arguments)
            for num_workers in (0, 1) if cache and server is Dated else (0,):
                found = dict[str, str]()
                for keys, values in DataLoader(dataset, batch_size=4, num_workers=num_workers):
                    found.update(zip(keys, values, strict=True))
                assert found == texts


def read_in_another_process(location: Location, end: Connection) -> None:
    end.send("ready")
    end.recv()
    end.send(location.read_whole())


@pytest.mark.slow
def test_a_shared_cache_fetches_once(
    seaweedfs_server: Server, behind: Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    name = uuid.uuid4().hex
    put(at_server(seaweedfs_server, name), CONTENT)
    proxy.set(Script(latency_s=0.3))  # This makes requests overlap.
    location = cached(at_server(behind, name), tmp_path)
    client().close()  # Each process then starts its own storage process, as torchrun's ranks do.
    context = multiprocessing.get_context("spawn")
    ends, others = zip(*(context.Pipe() for _ in range(3)), strict=True)
    for other in others:
        context.Process(target=read_in_another_process, args=(location, other), daemon=True).start()
    assert [end.recv() for end in ends] == ["ready"] * 3
    for end in ends:
        end.send("go")
    assert ([end.recv() for end in ends], bytes_requested(proxy)) == ([CONTENT] * 3, len(CONTENT))


# Damaged


def write_samples(folder: Location, contents: dict[str, bytes]) -> dict[str, bytes]:
    with ShardWriter(str(folder)) as writer:
        for key, content in contents.items():
            writer.write({"__key__": key, "bin": content})
    return contents


def read_samples(folder: Location, cache: Path) -> dict[str, bytes]:
    return dict(ShardDataset(str(folder), fields=("key", "bin"), cache=cache))


def clear_pieces(folder: Location, cache: Path) -> Iterator[str]:
    """Clear each piece of the cached content in turn, as a power failure may, but keep the marks of the blocks."""
    num_bytes = 100  # The keys of an index need fewer than 100 bytes.
    for name in folder.list():
        found = (folder / name).stat()
        copy = cache / name_copy(found)
        for start in range(0, found.size, num_bytes):
            stop = min(start + num_bytes, found.size)
            content = copy.read_bytes()
            copy.write_bytes(content[:start] + bytes(stop - start) + content[stop:])
            yield f"{name} from byte {start} on"


def test_what_a_power_failure_cleared_is_fetched_again(tmp_path: Path) -> None:
    folder = in_memory("x")
    expected = write_samples(folder, {f"{i:050d}": bytes([i + 1]) * (60 + i) for i in range(5)})
    assert read_samples(folder, tmp_path) == expected
    for where in clear_pieces(folder, tmp_path):
        assert read_samples(folder, tmp_path) == expected, where


def test_a_flipped_bit_in_the_store_is_an_error(tmp_path: Path) -> None:
    folder = in_memory("x")
    write_samples(folder, {str(i): CONTENT[i : i + 5000] for i in range(20)})
    (name,) = [name for name in folder.list() if name.endswith(".tar")]
    tar = bytearray((folder / name).read_whole())
    tar[tar.index(CONTENT[19 + 4990 : 19 + 5000])] ^= 1
    put(folder / name, bytes(tar))
    with pytest.raises(SampleError, match=r"sample \d+ in memory://.*\.tar at byte .*is damaged"):
        read_samples(folder, tmp_path / "cache")


@pytest.mark.parametrize("mark", [2, 255])
def test_blocks_with_damaged_marks_are_fetched_again(mark: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * 8
    with closing(cached(put(in_memory(), content), tmp_path).open()) as file:
        assert file.read(0, len(content)) == content
        (copy,) = tmp_path.glob(f"*{COPY_SUFFIX}")
        copy.write_bytes(content + bytes([mark]) * 4)
        assert file.read(0, len(content)) == content


def test_a_tar_that_is_damaged_in_the_cache_is_indexed_as_it_is_in_the_store(tmp_path: Path) -> None:
    expected = {f"{i:03d}": bytes([i + 1]) * 3000 for i in range(4)}
    write_tar(tmp_path / "a.tar", [(f"{key}.bin", value) for key, value in expected.items()])
    location = put(in_memory("x/a.tar"), (tmp_path / "a.tar").read_bytes())
    with closing(parse_location(str(location), make_access(cache=tmp_path)).open()) as file:
        file.read(0, file.size)  # Like interrupted indexing.
    (copy,) = tmp_path.glob(f"*{COPY_SUFFIX}")
    copy.write_bytes(copy.read_bytes().replace(bytes([3]) * BLOCK, bytes(BLOCK)))
    assert read_samples(location, tmp_path) == expected


# Folders that cannot be used

FILL_AND_READ = """
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path

import shardio

with shardio.ShardWriter("memory://x/data") as writer:
    for number in range(100):
        writer.write({"__key__": str(number), "txt": "x" * 2000})
for disk in map(Path, sys.argv[1:]):  # After an error, reading ahead may still write to the old disk.
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "none", disk], check=True)
    (disk / "other").write_bytes(bytes(2**20 - 4096 - int(disk.name)))
    try:
        dataset = shardio.ShardDataset("memory://x/data", fields=("txt",), cache=disk, cache_size="100MB")
        for _ in shardio.DataLoader(dataset):
            pass
    except OSError as error:
        assert error.errno == ENOSPC, error
        print(error)
"""


@pytest.mark.slow
def test_a_full_disk_is_named_whatever_is_written(tmp_path: Path) -> None:
    unshare = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", tmp_path], check=False).returncode:
        pytest.skip("this system does not let users mount file systems")
    disks = [str(tmp_path / str(num_free)) for num_free in (0, 4096, 8192, 16384, 57344)]
    output = subprocess.check_output([*unshare, sys.executable, "-c", FILL_AND_READ, *disks], text=True)
    start = "[Errno 28] No space left on device: cannot write to the cache"
    remedy = "Free some space, set cache_size, or set cache to a folder on another disk"
    assert output.splitlines() == [f"{start} {disk}. {remedy}" for disk in disks]


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_folder_that_cannot_be_a_cache_is_not_an_error_of_the_manifest(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = in_memory("data")
    write_samples(folder, {"0": b"0"})
    message = rf"cannot write to the cache {tmp_path / name}\. Set cache to a writable folder"
    caught = assert_raises(OSError, message, read_samples, folder, tmp_path / name)
    assert "manifest" not in str(caught)


FOLDER = parse_location("s3://bucket/images")


def listing_of(sizes: dict[str, int], version: str = "1") -> Listing:
    return make_listing(FOLDER, [(f"images/{key}", size, version) for key, size in sorted(sizes.items())], [])


FILES = st.dictionaries(st.text(min_size=1, max_size=8), st.integers(0, MEAN_BYTES), max_size=40)


@given(FILES, st.text(max_size=8))
def test_a_listing_finds_its_files_each_with_whole_blocks_of_its_own(sizes: dict[str, int], other: str) -> None:
    listing = listing_of(sizes)
    assert [listing.find(key) for key in listing.keys] == list(range(len(listing.keys)))
    assert other in sizes or listing.find(f"images/{other}") is None
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


@settings(max_examples=10)
@given(st.integers(0, 2999), st.sampled_from(["add", "remove", "resize"]))
def test_a_bundle_has_16_mb_on_average_and_a_changed_file_changes_at_most_two(number: int, change: str) -> None:
    sizes = {f"{i:04d}.jpg": 200_000 for i in range(3000)}
    bundles = cut_bundles(listing_of(sizes))
    assert 0.7 * MEAN_BYTES < bundles.sizes.mean() < 1.3 * MEAN_BYTES
    before = set(bundles.names)
    if change == "remove":
        del sizes[f"{number:04d}.jpg"]
    else:
        sizes[f"{number:04d}-.jpg" if change == "add" else f"{number:04d}.jpg"] = 300_000
    after = set(cut_bundles(listing_of(sizes)).names)
    assert 1 <= len(after - before) <= 2
    assert 1 <= len(before - after) <= 2
    assert before.isdisjoint(cut_bundles(listing_of(sizes, "2")).names), "a name depends on the versions"


@given(st.binary(max_size=2000))
def test_a_content_and_its_hash_fill_whole_blocks(content: bytes) -> None:
    tail = make_tail(content)
    assert tail.startswith(xxhash.xxh3_128_digest(content))
    assert len(content) + len(tail) == size_in_bundle(len(content))


# Copies

SIZE = 20 * BLOCK + 77
COPIED = np.random.default_rng(0).bytes(SIZE)
NUM_BLOCKS = 21
blocks = st.tuples(st.integers(0, NUM_BLOCKS), st.integers(0, NUM_BLOCKS)).map(sorted)
ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted)


def block_range(first: int, last: int) -> tuple[int, int]:
    return first * BLOCK, min(last * BLOCK, SIZE)


@given(st.lists(st.tuples(st.booleans(), blocks), max_size=12), st.lists(ranges, min_size=1, max_size=20))
def test_a_range_needs_all_its_blocks(operations: list[tuple[bool, list[int]]], wanted: list[list[int]]) -> None:
    present = np.zeros(NUM_BLOCKS, np.bool_)  # The model.
    with tempfile.TemporaryDirectory() as folder:
        copy = CachedCopy(path=f"{folder}/x.copy", size=SIZE)
        for is_write, (first, last) in operations:
            start, stop = block_range(first, last)
            if not is_write:
                copy.unmark(start, stop)
            elif first < last:
                write_copy(copy, start, COPIED[start:stop])
            present[first:last] = is_write
        expected = [
            COPIED[start:stop] if start == stop or present[start // BLOCK : -(-stop // BLOCK)].all() else None
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


def test_a_copy_takes_only_the_space_of_its_blocks_and_may_be_removed(tmp_path: Path) -> None:
    copy = CachedCopy(path=str(tmp_path / "x.copy"), size=10**9)
    start = 5 * 10**6 // BLOCK * BLOCK
    write_copy(copy, start, bytes(BLOCK))
    assert copy.read([start], [start + 10]) == [bytes(10)]
    assert Path(copy.path).stat().st_blocks * 512 < 100_000
    Path(copy.path).unlink()
    assert copy.read([start], [start + 10]) == [None]
    assert not copy.unmark(start, start + 10)


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
def test_a_dubious_copy_is_replaced(
    make_doubtful: Callable[[Path], object], location: Location, tmp_path: Path
) -> None:
    path = plant(location, tmp_path / "cache")
    assert read(location, tmp_path / "cache") == PLANTED, "the copy has the expected path"
    make_doubtful(path)
    assert (read(location, tmp_path / "cache"), stat.S_IMODE(path.lstat().st_mode)) == (ORIGINAL, 0o600)
    assert path.lstat().st_uid == os.geteuid()


@pytest.mark.parametrize(
    ("owner", "mode"), [pytest.param(OTHER_USER, 0o755, marks=as_root), (None, 0o777), (None, 0o775)]
)
def test_a_folder_others_write_to_is_refused(owner: int | None, mode: int, location: Location, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "notes.txt").touch()  # The folder is also used for something else.
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
    cache.chmod(0o1777)  # Like /tmp.
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
    cache.chmod(0o775)  # New folders have mode 0775 if each user has a private group.
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
    with tempfile.TemporaryDirectory() as name:  # Other users cannot access pytest's folders.
        cache = Path(name)
        cache.chmod(0o2777)
        assert read(location, cache, shared=True) == ORIGINAL
        (copy,) = cache.glob(f"*{COPY_SUFFIX}")
        command = [sys.executable, "-c", CHANGE_AS_ANOTHER_USER, str(OTHER_USER), str(copy), str(len(ORIGINAL))]
        subprocess.run(command, check=True)
        assert read(location, cache, shared=True) == ORIGINAL[::-1]
