"""A cache stays within its size, holds the right bytes, and asks the store for nothing twice."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import DataLoader, ShardDataset, ShardWriter
from shardio.errors import SampleError
from shardio.storage import Location, make_access, parse_location
from shardio.storage.client import client
from shardio.storage.copies import BLOCK, COPY_SUFFIX, name_copy
from tests.faults.proxy import FaultProxy, Script
from tests.raising import assert_raises
from tests.servers.server import Server
from tests.servers.web_folder import WebFolder, serve_folder
from tests.storage.conftest import at_server, in_memory, options_of, put
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
    proxy.set(Script(latency_s=0.05))  # So that requests overlap.
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
    assert bytes_in(tmp_path) > 2_000_000, "not more is removed than necessary"
    are_kept = [(tmp_path / name_copy((folder / str(i)).stat())).exists() for i in range(20)]
    assert are_kept == sorted(are_kept)
    assert are_kept[-1]
    assert (tmp_path / "mine.txt").stat().st_size == 10**7


def test_a_cache_that_is_too_small_for_one_object_returns_it_all_the_same(tmp_path: Path) -> None:
    with closing(cached(put(in_memory(), CONTENT), tmp_path, 100_000).open()) as file:
        for start in range(0, len(CONTENT), 100_000):
            assert file.read(start, start + 100_000) == CONTENT[start : start + 100_000]
    assert bytes_in(tmp_path) <= 100_000 + 1_100_000, "at most one object more"


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
    """Like nginx, whose ETags contain the time in seconds."""

    def describe(self, content: bytes) -> list[tuple[str, str]]:
        return [("ETag", f'"{(self.root / self.path[1:]).stat().st_mtime_ns // 10**9}-{len(content)}"')]


@pytest.mark.parametrize("cache", [None, pytest.param("cache", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("write", "source"), [(pack_texts, ""), (write_tars, "/t-{000000..000003}.tar")])
def test_a_dataset_that_was_replaced_is_opened_again_in_the_same_process(
    write: Callable[[Path, dict[str, str]], None],
    source: str,
    cache: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))  # It keeps the indexes of these tars.
    arguments: dict[str, Any] = {} if cache is None else {"cache": tmp_path / cache, "cache_size": "100MB"}
    folder = tmp_path / "served" / "data"
    folder.parent.mkdir()
    with serve_folder(folder.parent, Dated) as (url, _):
        for round_, word in enumerate(["old", "new", "dew"]):  # The tars have equal sizes each time.
            texts = {f"{i:04d}": f"{word}{i:04d}" for i in range(NUM_SAMPLES)}
            shutil.rmtree(folder, ignore_errors=True)
            write(folder, texts)
            for path in folder.iterdir():
                os.utime(path, (10**9 + round_, 10**9 + round_))
            dataset = ShardDataset(f"{url}/data{source}", fields=("key", "txt"), **arguments)
            for num_workers in (0, 1) if cache else (0,):
                found = dict[str, str]()
                for keys, values in DataLoader(dataset, batch_size=4, num_workers=num_workers):
                    found.update(zip(keys, values, strict=True))
                assert found == texts


def read_in_another_process(location: Location, end: Connection) -> None:
    end.send("ready")
    end.recv()
    end.send(location.read_whole())


@pytest.mark.slow
def test_a_shared_cache_fetches_an_object_once(
    seaweedfs_server: Server, behind: Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    name = uuid.uuid4().hex
    put(at_server(seaweedfs_server, name), CONTENT)
    proxy.set(Script(latency_s=0.3))  # So that requests overlap.
    location = cached(at_server(behind, name), tmp_path)
    client().close()  # So that each process has a storage process of its own, as the ranks of torchrun have.
    context = multiprocessing.get_context("spawn")
    ends = []
    for _ in range(3):
        end, other = context.Pipe()
        context.Process(target=read_in_another_process, args=(location, other), daemon=True).start()
        ends.append(end)
    for end in ends:
        assert end.recv() == "ready"
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
    """Clear each piece of the cached content in turn, as a power failure may. The marks of the blocks stay."""
    num_bytes = 100  # The keys in an index take fewer.
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


def test_a_flipped_bit_is_repaired_in_the_cache_and_an_error_in_the_store(tmp_path: Path) -> None:
    folder = in_memory("x")
    expected = write_samples(folder, {str(i): CONTENT[i : i + 5000] for i in range(20)})
    assert read_samples(folder, tmp_path / "cache") == expected
    for copy in (tmp_path / "cache").glob(f"*{COPY_SUFFIX}"):
        content = bytearray(copy.read_bytes())
        for found in re.finditer(re.escape(CONTENT[3000:3100]), bytes(content)):
            content[found.start()] ^= 1
        copy.write_bytes(content)
    assert read_samples(folder, tmp_path / "cache") == expected
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
import sys
from errno import ENOSPC
from pathlib import Path

import shardio

disk = Path(sys.argv[1])
with shardio.ShardWriter("memory://x/data") as writer:
    for number in range(100):
        writer.write({"__key__": str(number), "txt": "x" * 2000})
for num_free in map(int, sys.argv[2:]):
    for path in disk.iterdir():
        path.unlink()
    (disk / "other").write_bytes(bytes(2**20 - 4096 - num_free))
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
    script = 'mount -t tmpfs -o size=1m,mode=700 none "$0" && "$@"'
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, str(tmp_path)]
    if subprocess.run([*mount, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this system does not let users mount file systems")
    all_free = [0, 4096, 8192, 16384, 57344]
    fill = [*mount, sys.executable, "-c", FILL_AND_READ, str(tmp_path), *map(str, all_free)]
    remedy = "Free some space, set cache_size, or set cache to a folder on another disk"
    expected = f"[Errno 28] No space left on device: cannot write to the cache {tmp_path}. {remedy}"
    assert subprocess.check_output(fill, text=True).splitlines() == [expected] * len(all_free)


@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_folder_that_cannot_be_a_cache_is_not_an_error_of_the_manifest(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = in_memory("data")
    write_samples(folder, {"0": b"0"})
    message = rf"cannot write to the cache {tmp_path / name}\. Set cache to a folder"
    caught = assert_raises(OSError, message, read_samples, folder, tmp_path / name)
    assert "manifest" not in str(caught)
