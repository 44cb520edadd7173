"""A rank's share of an epoch is fetched once, in few requests, and nothing else is."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shardio import DataLoader, ShardDataset, ShardWriter
from shardio.storage import Location
from tests.faults.proxy import FaultProxy, Script
from tests.servers.fixtures import seaweedfs_server
from tests.servers.server import Server
from tests.storage.conftest import at_server
from tests.storage.uploading import upload

__all__ = ["seaweedfs_server"]

NUM_SAMPLES, NUM_SHARDS = 1200, 12


@pytest.fixture(scope="module")
def proxy(seaweedfs_server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port, Script(latency_s=0.01)) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of random bytes, 30 kB a sample on average."""
    folder, content = tmp_path_factory.mktemp("read-ahead") / "data", np.random.default_rng(0)
    with ShardWriter(folder, max_shard_samples=NUM_SAMPLES // NUM_SHARDS) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:04d}", "bin": content.bytes(int(content.integers(20_000, 40_000)))})
    return folder


@pytest.fixture(scope="module")
def remote(seaweedfs_server: Server, local: Path) -> Location:
    return upload(local, f"{seaweedfs_server.url}/{uuid.uuid4().hex}", seaweedfs_server.options)


def behind(remote: Location, server: Server, proxy: FaultProxy) -> tuple[str, dict[str, str]]:
    """Return the URL and the options of a dataset, seen through the proxy."""
    at_proxy = at_server(server.behind(proxy.host, proxy.port), remote.key)
    return str(at_proxy), dict(at_proxy.store.options.config)  # type: ignore[attr-defined]  # It is an ObjectStore.


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("loader_type", [DataLoader, torch.utils.data.DataLoader])
def test_a_rank_fetches_its_share_once(
    remote: Location,
    local: Path,
    seaweedfs_server: Server,
    proxy: FaultProxy,
    shuffle: bool,
    world_size: int,
    loader_type: type,
) -> None:
    url, options = behind(remote, seaweedfs_server, proxy)
    settings = {"lanes": 2, "window": 300} if shuffle else {}
    share = {"rank": 0, "world_size": world_size, "remainder": "keep", "batch_size": 20, "fields": ("key", "bin")}
    datasets = [
        ShardDataset(url, shuffle=shuffle, **settings, **share, storage_options=options),  # type: ignore[arg-type]
        ShardDataset(local, shuffle=shuffle, **settings, **share),  # type: ignore[arg-type]  # Several types.
    ]
    proxy.reset()
    found, expected = ([list(batch) for batch in loader_type(each, batch_size=20, num_workers=2)] for each in datasets)
    assert found == expected
    num_bytes = sum(len(content) for _, contents in expected for content in contents)
    gets = [each for each in proxy.requests() if each.method == "GET" and each.path.endswith(".tar")]
    assert sum(each.num_bytes for each in gets) <= 1.05 * num_bytes
    if world_size == 1:  # A sample at a time would take 1200 requests, and more.
        assert len(gets) < 400


def test_a_second_epoch_fetches_nothing(
    remote: Location, seaweedfs_server: Server, proxy: FaultProxy, tmp_path: Path
) -> None:
    url, options = behind(remote, seaweedfs_server, proxy)
    for epoch in range(2):
        dataset = ShardDataset(url, shuffle=True, storage_options=options, fields=("key", "bin"), cache=tmp_path)
        loader = DataLoader(dataset, batch_size=50, num_workers=2)
        loader.set_epoch(epoch)
        proxy.reset()
        assert sum(len(keys) for keys, _ in loader) == NUM_SAMPLES
    assert not [each for each in proxy.requests() if each.method == "GET" and each.range is not None]
