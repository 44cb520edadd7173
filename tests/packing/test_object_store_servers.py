"""Packs into a real object store, over HTTP: multipart uploads, worker processes, and what the server refuses."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio.errors import StoreError
from shardio.storage import StorageOptions, make_direct_access, parse_location
from shardio.storage.remote.operations import PART
from tests.faults.proxy import FaultProxy, Script
from tests.files import read_files, read_objects
from tests.servers.fixtures import seaweedfs_server
from tests.servers.server import Server

__all__ = ["seaweedfs_server"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files, the first of which is larger than a part of an upload."""
    folder = tmp_path_factory.mktemp("servers") / "in"
    folder.mkdir()
    for number, num_bytes in enumerate([PART + 1, 1000, 1000, 1000]):
        (folder / f"{number}.bin").write_bytes(np.random.default_rng(number).bytes(num_bytes))
    return folder


def test_the_bytes_equal_those_of_a_local_pack(seaweedfs_server: Server, source: Path, tmp_path: Path) -> None:
    url, options = f"{seaweedfs_server.url}/{uuid.uuid4().hex}", seaweedfs_server.options
    for where, storage_options in ((str(tmp_path / "out"), None), (url, options)):
        shardio.pack(source, where, fields=["bin"], max_shard_samples=2, num_workers=2, storage_options=storage_options)
    assert read_objects(parse_location(url, make_direct_access(options))) == read_files(tmp_path / "out")
    with shardio.ShardWriter(url, overwrite=True, storage_options=options) as writer:
        writer.write({"__key__": "a", "txt": "text"})
    assert len(shardio.ShardDataset(url, fields="key", storage_options=options)) == 1


def test_what_the_server_refuses_is_an_error_with_its_reason(seaweedfs_server: Server, source: Path) -> None:
    options = seaweedfs_server.options
    with pytest.raises(PermissionError, match=r"cannot list s3://.*: the server answered 403 .*Check the credentials"):
        shardio.pack(source, f"{seaweedfs_server.url}/x", storage_options={**options, "secret_access_key": "wrong"})
    with pytest.raises(StoreError, match=r"cannot list s3://missing/x: .*NoSuchBucket"):
        shardio.pack(source, "s3://missing/x", storage_options=options)


FAULTS = dict.fromkeys(("status_500", "status_503", "reset_before", "reset_in_body", "truncated", "corrupt"), 0.06)


@pytest.mark.parametrize("seed", range(2))
def test_a_network_with_faults_changes_nothing(
    seaweedfs_server: Server, source: Path, tmp_path: Path, seed: int
) -> None:
    """Also if an answer is lost after the server has written an object: the mark is then this pack's own."""
    shardio.pack(source, tmp_path / "out", fields=["bin"], max_shard_samples=1)
    script = Script(seed=seed, faults=FAULTS, methods=("GET", "HEAD", "PUT", "POST", "DELETE"))
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port, script) as proxy:
        options: StorageOptions = {
            **seaweedfs_server.options,
            "endpoint": f"http://127.0.0.1:{proxy.port}",
            "timeout_s": 3,
        }
        url = f"{seaweedfs_server.url}/{uuid.uuid4().hex}"
        shardio.pack(source, url, fields=["bin"], max_shard_samples=1, num_workers=1, storage_options=options)
        assert proxy.counts().num_faults
    found = parse_location(url, make_direct_access(seaweedfs_server.options))
    assert read_objects(found) == read_files(tmp_path / "out")
