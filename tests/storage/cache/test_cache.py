"""A cache stays within its size, holds the right bytes, and asks the store for nothing twice."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from shardio import ShardDataset
from shardio.errors import SampleError
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, write_manifest, write_shard
from shardio.storage import Location, RemoteAccess, make_access, parse_location
from shardio.storage.options import COPY_SUFFIX
from shardio.storage.remote.client import client
from tests.faults.proxy import FaultProxy, Script
from tests.servers.fixtures import seaweedfs_server
from tests.servers.server import Server
from tests.storage.conftest import at_server

__all__ = ["seaweedfs_server"]

CONTENT = np.random.default_rng(0).bytes(1_000_000)


@pytest.fixture(scope="module")
def proxy(seaweedfs_server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port) as proxy:
        yield proxy


def put(location: Location, content: bytes = CONTENT) -> Location:
    with location.write_whole() as file:
        file.write(content)
    return location


def cached(location: Location, cache: Path, size: str | int = "100MB") -> Location:
    """Return the same location, read through a cache."""
    settings = make_access(cache=cache, cache_size=size).cache
    options = location.store.options  # type: ignore[attr-defined]  # It is an ObjectStore.
    return parse_location(str(location), RemoteAccess(options=options, cache=settings))


def bytes_in(cache: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in cache.glob(f"*{COPY_SUFFIX}"))


def bytes_requested(proxy: FaultProxy) -> int:
    return sum(each.num_bytes for each in proxy.requests() if each.method == "GET")


def test_nothing_is_fetched_twice(seaweedfs_server: Server, proxy: FaultProxy, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    put(at_server(seaweedfs_server, name))
    proxy.set(Script(latency_s=0.05))  # So that requests overlap.
    proxy.reset()
    location = cached(at_server(seaweedfs_server.behind(proxy.host, proxy.port), name), tmp_path)
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


def test_the_least_recently_used_copies_are_removed_first(tmp_path: Path) -> None:
    folder = parse_location(f"memory://{uuid.uuid4().hex}/x")
    for i in range(20):
        put(folder / str(i), CONTENT[i:])
    cache = tmp_path / "cache"
    for i in range(20):
        with closing(cached(folder / str(i), cache, 5_000_000).open()) as file:
            assert file.read(0, file.size) == CONTENT[i:]
        assert bytes_in(cache) <= 5_000_000
    assert bytes_in(cache) > 2_000_000, "not more is removed than necessary"


def test_a_cache_that_is_too_small_for_one_object_returns_it_all_the_same(tmp_path: Path) -> None:
    location = put(parse_location(f"memory://{uuid.uuid4().hex}/a"))
    with closing(cached(location, tmp_path / "cache", 100_000).open()) as file:
        for start in range(0, len(CONTENT), 100_000):
            assert file.read(start, start + 100_000) == CONTENT[start : start + 100_000]
    assert bytes_in(tmp_path / "cache") <= 100_000 + 1_100_000, "at most one object more"


def test_files_that_are_not_copies_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(bytes(10**6))
    folder = parse_location(f"memory://{uuid.uuid4().hex}/x")
    for i in range(5):
        with closing(cached(put(folder / str(i)), tmp_path, 1_500_000).open()) as file:
            file.read(0, file.size)
    assert (tmp_path / "mine.txt").stat().st_size == 10**6


def test_a_replaced_object_has_another_copy(tmp_path: Path) -> None:
    location = put(parse_location(f"memory://{uuid.uuid4().hex}/a"))
    with closing(cached(location, tmp_path).open()) as file:
        assert file.read(0, 100) == CONTENT[:100]
    put(location, CONTENT[::-1])
    with closing(cached(location, tmp_path).open()) as file:
        assert file.read(0, 100) == CONTENT[::-1][:100]


def test_a_manifest_that_was_replaced_elsewhere_is_read_anew(seaweedfs_server: Server, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    put(at_server(seaweedfs_server, name), b"old")
    location = cached(at_server(seaweedfs_server, name), tmp_path)
    assert location.read_whole() == b"old"
    obstore_program = (
        "import sys, json, obstore; from obstore.store import S3Store; options = json.loads(sys.argv[1]); "
        "options.pop('allow_http'); store = S3Store(sys.argv[2], config=options, client_options={'allow_http': True}); "
        "obstore.put(store, sys.argv[3], b'new')"
    )
    arguments = [json.dumps(dict(seaweedfs_server.options)), seaweedfs_server.url[5:], name]
    subprocess.run([sys.executable, "-c", obstore_program, *arguments], check=True)
    assert location.read_whole() == b"new"


def read_in_another_process(location: Location, end: Connection) -> None:
    """Read an object when told to."""
    end.send("ready")
    end.recv()
    end.send(location.read_whole())


def test_processes_with_a_shared_cache_fetch_a_manifest_once(
    seaweedfs_server: Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    name = uuid.uuid4().hex
    put(at_server(seaweedfs_server, name))
    proxy.set(Script(latency_s=0.3))  # So that requests overlap.
    proxy.reset()
    location = cached(at_server(seaweedfs_server.behind(proxy.host, proxy.port), name), tmp_path)
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
    assert [end.recv() for end in ends] == [CONTENT] * 3
    assert bytes_requested(proxy) == len(CONTENT)


def write_samples(folder: Location, num_samples: int = 20) -> dict[str, bytes]:
    samples = [Sample(key=str(i), fields={"bin": CONTENT[i : i + 5000]}, origin="") for i in range(num_samples)]
    entry, _ = write_shard(folder / "shard-000000.tar", samples)
    write_manifest(folder / MANIFEST_NAME, Manifest(shards=(entry,), fields=("bin",)))
    return {sample.key: sample.fields["bin"] for sample in samples}


def read_samples(folder: Location, cache: Path) -> dict[str, bytes]:
    dataset = ShardDataset(str(folder), fields=("key", "bin"), cache=cache)
    return dict(dataset)


def test_damage_in_the_cache_is_repaired(tmp_path: Path) -> None:
    folder = parse_location(f"memory://{uuid.uuid4().hex}/x")
    expected = write_samples(folder)
    assert read_samples(folder, tmp_path) == expected
    for copy in tmp_path.glob(f"*{COPY_SUFFIX}"):
        content = bytearray(copy.read_bytes())
        for found in re.finditer(re.escape(CONTENT[3000:3100]), bytes(content)):
            content[found.start()] ^= 1
        copy.write_bytes(content)
    assert read_samples(folder, tmp_path) == expected


def test_damage_in_the_store_is_an_error_that_names_the_sample(tmp_path: Path) -> None:
    folder = parse_location(f"memory://{uuid.uuid4().hex}/x")
    write_samples(folder)
    tar = bytearray((folder / "shard-000000.tar").read_whole())
    tar[tar.index(CONTENT[19 + 4990 : 19 + 5000])] ^= 1
    put(folder / "shard-000000.tar", bytes(tar))
    with pytest.raises(SampleError, match=r"sample \d+ in memory://.*\.tar at byte .*is damaged"):
        read_samples(folder, tmp_path)
