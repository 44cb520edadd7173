"""Outdated and damaged content of a cache is fetched again, whatever it belongs to."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardio import DataLoader, ShardDataset, ShardWriter
from shardio.sample import Sample
from shardio.shards import MANIFEST_NAME, Manifest, write_manifest, write_shard
from shardio.storage import Location, make_access, parse_location
from shardio.storage.cache.copies import BLOCK
from shardio.storage.cache.filling import name_copy
from shardio.storage.options import COPY_SUFFIX
from tests.servers.fixtures import WebServer, nginx_server
from tests.storage.cache.test_cache import cached, put

__all__ = ["nginx_server"]

Texts = dict[str, str]

NUM_SAMPLES, PER_SHARD = 12, 3

PIECE = 100
"""The number of bytes to clear at a time. The keys in an index take fewer."""


def pack_texts(folder: Path, texts: Texts) -> None:
    with ShardWriter(folder, max_shard_samples=PER_SHARD) as writer:
        for key, text in texts.items():
            writer.write({"__key__": key, "txt": text})


def write_tars(folder: Path, texts: Texts) -> None:
    folder.mkdir()
    items = list(texts.items())
    for shard in range(NUM_SAMPLES // PER_SHARD):
        with tarfile.open(folder / f"t-{shard:06d}.tar", "w") as tar:
            for key, text in items[shard * PER_SHARD : (shard + 1) * PER_SHARD]:
                member = tarfile.TarInfo(f"{key}.txt")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def own_indexes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the indexes of tars on web servers in a folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.mark.usefixtures("own_indexes")
@pytest.mark.parametrize("cache", [None, "cache"])
@pytest.mark.parametrize(("write", "source"), [(pack_texts, ""), (write_tars, "/t-{000000..000003}.tar")])
def test_a_dataset_that_was_replaced_is_opened_again_in_the_same_process(
    write: Callable[[Path, Texts], None], source: str, cache: str | None, nginx_server: WebServer, tmp_path: Path
) -> None:
    name = uuid.uuid4().hex
    arguments: dict[str, Any] = {} if cache is None else {"cache": tmp_path / cache, "cache_size": "100MB"}
    for round_, word in enumerate(["old", "new", "dew"]):  # The tars have equal sizes each time.
        texts = {f"{i:04d}": f"{word}{i:04d}" for i in range(NUM_SAMPLES)}
        folder = nginx_server.files / name
        shutil.rmtree(folder, ignore_errors=True)
        write(folder, texts)
        for path in folder.iterdir():
            os.utime(path, (10**9 + round_, 10**9 + round_))  # nginx's ETags have the time in seconds.
        dataset = ShardDataset(f"{nginx_server.server.url}/{name}{source}", fields=("key", "txt"), **arguments)
        for num_workers in (0, 1):
            found = dict[str, str]()
            for keys, values in DataLoader(dataset, batch_size=4, num_workers=num_workers):
                found.update(zip(keys, values, strict=True))
            assert found == texts


def write_samples(folder: Location) -> dict[str, bytes]:
    samples = [Sample(key=f"{i:050d}", fields={"bin": bytes([i + 1]) * (60 + i)}, origin="") for i in range(5)]
    entry, _ = write_shard(folder / "shard-000000.tar", samples)
    write_manifest(folder / MANIFEST_NAME, Manifest(shards=(entry,), fields=("bin",)))
    return {sample.key: sample.fields["bin"] for sample in samples}


def read_samples(folder: Location, cache: Path) -> dict[str, bytes]:
    return dict(ShardDataset(str(folder), fields=("key", "bin"), cache=cache))


def clear_pieces(folder: Location, cache: Path) -> Iterator[str]:
    """Clear each piece of the cached content in turn, as a power failure may. The marks of the blocks stay."""
    for name in folder.list():
        found = (folder / name).stat()
        copy = cache / name_copy(found)
        for start in range(0, found.size, PIECE):
            stop = min(start + PIECE, found.size)
            content = copy.read_bytes()
            copy.write_bytes(content[:start] + bytes(stop - start) + content[stop:])
            yield f"{name} from byte {start} on"


def test_what_a_power_failure_cleared_is_fetched_again(tmp_path: Path) -> None:
    folder = parse_location(f"memory://{uuid.uuid4().hex}/x")
    expected = write_samples(folder)
    assert read_samples(folder, tmp_path) == expected
    for where in clear_pieces(folder, tmp_path):
        assert read_samples(folder, tmp_path) == expected, where


def test_a_small_object_that_a_power_failure_cleared_is_fetched_again(tmp_path: Path) -> None:
    content = b"0123456789" * 7
    location = put(parse_location(f"memory://{uuid.uuid4().hex}/a"), content)
    assert cached(location, tmp_path).read_whole() == content
    (copy,) = tmp_path.glob(f"*{COPY_SUFFIX}")
    copy.write_bytes(bytes(len(content)) + copy.read_bytes()[len(content) :])
    assert cached(location, tmp_path).read_whole() == content


@pytest.mark.parametrize("mark", [2, 255])
def test_blocks_with_damaged_marks_are_fetched_again(mark: int, tmp_path: Path) -> None:
    content = bytes(range(256)) * 8
    location = put(parse_location(f"memory://{uuid.uuid4().hex}/a"), content)
    with closing(cached(location, tmp_path).open()) as file:
        assert file.read(0, len(content)) == content
        (copy,) = tmp_path.glob(f"*{COPY_SUFFIX}")
        copy.write_bytes(content + bytes([mark]) * 4)
        assert file.read(0, len(content)) == content


def test_a_tar_that_is_damaged_in_the_cache_is_indexed_as_it_is_in_the_store(tmp_path: Path) -> None:
    folder = parse_location(f"memory://{uuid.uuid4().hex}/x")
    expected = {f"{i:03d}": bytes([i + 1]) * 3000 for i in range(4)}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for key, value in expected.items():
            member = tarfile.TarInfo(f"{key}.bin")
            member.size = len(value)
            tar.addfile(member, io.BytesIO(value))
    location = put(folder / "a.tar", content.getvalue())
    access = make_access(cache=tmp_path)
    with closing(parse_location(str(location), access).open()) as file:  # As an indexing that was interrupted.
        file.read(0, file.size)
    (copy,) = tmp_path.glob(f"*{COPY_SUFFIX}")
    copy.write_bytes(copy.read_bytes().replace(bytes([3]) * BLOCK, bytes(BLOCK)))
    found = dict(ShardDataset(str(location), fields=("key", "bin"), cache=tmp_path))
    assert found == expected
