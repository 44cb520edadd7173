"""A rank's share of an epoch is fetched once, in few requests, and nothing else is."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardio import DataLoader, ShardDataset, ShardWriter
from shardio.storage import Location
from tests.faults.proxy import FaultProxy, Script
from tests.servers.server import Server
from tests.storage.conftest import at_server, options_of, put_all

NUM_SAMPLES, NUM_SHARDS = 600, 12


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, content = tmp_path_factory.mktemp("read-ahead") / "data", np.random.default_rng(0)
    with ShardWriter(folder, max_shard_samples=NUM_SAMPLES // NUM_SHARDS) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:04d}", "bin": content.bytes(int(content.integers(20_000, 40_000)))})
    return folder


@pytest.fixture(scope="module")
def stored(seaweedfs_server: Server, local: Path) -> Location:
    return put_all(local, at_server(seaweedfs_server, uuid.uuid4().hex))


@pytest.fixture
def remote(stored: Location, behind: Server, proxy: FaultProxy) -> Location:
    proxy.set(Script(latency_s=0.01))
    return at_server(behind, stored.key)


@pytest.mark.parametrize(
    ("loader_type", "world_size", "shuffle"),
    [
        (DataLoader, 1, True),
        pytest.param(DataLoader, 3, False, marks=pytest.mark.slow),
        (torch.utils.data.DataLoader, 2, True),
        (torch.utils.data.DataLoader, 1, False),
    ],
)
def test_a_rank_fetches_its_share_once(
    remote: Location, local: Path, proxy: FaultProxy, shuffle: bool, world_size: int, loader_type: type
) -> None:
    settings: dict[str, Any] = {"lanes": 2, "window": 150} if shuffle else {}
    settings |= {"rank": 0, "world_size": world_size, "remainder": "keep", "batch_size": 20, "fields": ("key", "bin")}
    datasets = [
        ShardDataset(str(remote), shuffle=shuffle, **settings, storage_options=options_of(remote)),
        ShardDataset(local, shuffle=shuffle, **settings),
    ]
    proxy.reset()
    found, expected = ([list(batch) for batch in loader_type(each, batch_size=20, num_workers=2)] for each in datasets)
    assert found == expected
    num_bytes = sum(len(content) for _, contents in expected for content in contents)
    gets = [each for each in proxy.requests() if each.method == "GET" and each.path.endswith(".tar")]
    assert sum(each.num_bytes for each in gets) <= 1.05 * num_bytes
    if world_size == 1:  # A sample at a time would take 600 requests, and more.
        assert len(gets) < 300


def test_a_second_epoch_fetches_nothing(remote: Location, proxy: FaultProxy, tmp_path: Path) -> None:
    for epoch in range(2):
        options: dict[str, Any] = {"storage_options": options_of(remote), "cache": tmp_path, "fields": ("key", "bin")}
        loader = DataLoader(ShardDataset(str(remote), shuffle=True, **options), batch_size=50, num_workers=1)
        loader.set_epoch(epoch)
        proxy.reset()
        assert sum(len(keys) for keys, _ in loader) == NUM_SAMPLES
    assert not [each for each in proxy.requests() if each.method == "GET" and each.range is not None]
