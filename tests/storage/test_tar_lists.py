"""Many tars that other tools packed are opened through the list in their folder."""

from __future__ import annotations

import gzip
import os
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import FormatError, StaleIndexError
from shardio.shards import index_tar, open_table, shard, write_tar_lists
from shardio.shards.indexing import TAR_LIST_NAME
from shardio.storage import Location, make_access, parse_location
from tests.faults.proxy import FaultProxy
from tests.raising import assert_raises
from tests.servers.server import Server, put_all
from tests.storage.conftest import at_server, options_of
from tests.tars import write_tar

NUM_TARS = 12


def write(folder: Path, number: int, content: bytes = b"1") -> Path:
    path = folder / f"{number:02d}.tar"
    write_tar(path, [(f"{number:02d}-{i}.txt", content) for i in range(3)])
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that contains tars and a list of them."""
    folder = tmp_path / "tars"
    folder.mkdir()
    reports = [index_tar(parse_location(write(folder, number))) for number in range(NUM_TARS)]
    assert write_tar_lists(reports) == [parse_location(folder)]
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each opened tar is appended."""
    names, original = list[str](), shard.Shard.__init__

    def spy(self: shard.Shard, tar: Location, index: Location) -> None:
        names.append(tar.name)
        original(self, tar, index)

    monkeypatch.setattr(shard.Shard, "__init__", spy)
    return names


def read(folder: Path) -> dict[str, bytes]:
    with shardio.open(folder) as samples:
        return {key: samples[key]["txt"] for key in samples}


def test_a_list_replaces_the_headers_of_the_tars(folder: Path, opened: list[str]) -> None:
    table = open_table(folder)
    assert opened == []
    (folder / TAR_LIST_NAME).unlink()
    assert open_table(folder) == table
    assert len(opened) == NUM_TARS


def test_changes_of_local_tars_are_found(folder: Path, opened: list[str]) -> None:
    write(folder, 3, b"changed")
    os.utime(folder / "03.tar", (1, 1))
    write(folder, NUM_TARS)
    (folder / "05.tar.idx").unlink()
    (folder / "00.tar").unlink()
    open_table(folder)
    assert set(opened) == {"03.tar", "05.tar", "12.tar"}
    found = read(folder)
    assert (len(found), found["03-0"], found["12-2"]) == (3 * NUM_TARS, b"changed", b"1")


def test_the_list_of_many_tars_is_written_at_opening(
    folder: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (folder / TAR_LIST_NAME).read_text()
    (folder / TAR_LIST_NAME).unlink()
    open_table(folder)
    assert not (folder / TAR_LIST_NAME).exists()
    monkeypatch.setattr("shardio.shards.sources.MIN_LISTED", NUM_TARS)
    open_table(folder)
    assert (folder / TAR_LIST_NAME).read_text() == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *((".+", content) for content in ("", "[]", '{"format": 2, "tars": {}}', '{"format": 1}')),
        (r'(?<="00.tar": ){[^}]+}', "{}"),
        (r'(?<="num_samples": )\d+', "-1"),
        (r'(?<="num_samples": )\d+', str(2**61)),
        (r'(?<="version": )"[^"]+"', "null"),
        (r'(?<="compression": )null', '"gzip"'),
        ("00.tar", "inner/00.tar"),
    ],
)
def test_a_damaged_list_is_an_error(folder: Path, old: str, new: str) -> None:
    path = folder / TAR_LIST_NAME
    damaged = re.sub(old, new, text := path.read_text(), count=1, flags=re.DOTALL)
    assert damaged != text
    path.write_text(damaged)
    assert_raises(FormatError, r"shardio-index\.json cannot be read.*run shardio index", open_table, folder)


def test_compressed_packed_and_already_indexed_tars_are_not_listed(folder: Path) -> None:
    (folder / TAR_LIST_NAME).unlink()
    assert write_tar_lists([index_tar(parse_location(folder / "00.tar"))]) == []
    (folder / "a.tar.gz").write_bytes(gzip.compress((folder / "00.tar").read_bytes()))
    assert write_tar_lists([index_tar(parse_location(folder / "a.tar.gz"))]) == []
    with shardio.ShardWriter(folder / "packed") as writer:
        writer.write({"__key__": "a", "txt": b"1"})
    (folder / "packed" / "shardio.json").unlink()
    assert write_tar_lists([index_tar(parse_location(folder / "packed" / "shard-000000.tar"))]) == []


def test_the_list_of_a_local_folder_is_ignored_in_a_store(folder: Path, seaweedfs_server: Server) -> None:
    remote = put_all(folder, at_server(seaweedfs_server, uuid.uuid4().hex))
    dataset = shardio.ShardDataset(str(remote), fields="txt", storage_options=options_of(remote))
    assert len(list(dataset)) == 3 * NUM_TARS
    tar = str(remote / "00.tar")
    assert_raises(FormatError, "is named twice", open_table, [tar, tar], make_access(options_of(remote)))


def test_remote_tars_need_few_requests(
    folder: Path, seaweedfs_server: Server, behind: Server, proxy: FaultProxy
) -> None:
    key = put_all(folder, at_server(seaweedfs_server, uuid.uuid4().hex)).key
    remote, direct = at_server(behind, key), at_server(seaweedfs_server, key)
    reports = [index_tar(direct / f"{number:02d}.tar") for number in range(NUM_TARS)]
    assert write_tar_lists(reports) == [direct]
    options: dict[str, Any] = {"storage_options": options_of(remote)}
    proxy.reset()
    with shardio.open(str(remote), **options) as samples:
        assert len(samples) == 3 * NUM_TARS
        assert len(proxy.requests()) <= 4
    with (direct / "04.tar").write_whole() as file:
        file.write((folder / "04.tar").read_bytes().replace(b"1\0\0", b"2\0\0"))
    dataset = shardio.ShardDataset(str(remote), fields="txt", **options)
    assert_raises(StaleIndexError, r"04\.tar, which has changed", list, dataset)
