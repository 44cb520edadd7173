"""``shardio doctor`` measures what a store behind a proxy of known speed delivers."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from shardio import ShardWriter
from shardio.cli.main import app
from tests.faults.proxy import FaultProxy, Script
from tests.servers.fixtures import seaweedfs_server
from tests.servers.server import Server
from tests.storage.uploading import upload

__all__ = ["seaweedfs_server"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, content = tmp_path_factory.mktemp("doctor") / "packed", np.random.default_rng(0)
    with ShardWriter(folder, max_shard_samples=10) as writer:
        for number in range(30):
            writer.write({"__key__": str(number), "bin": content.bytes(50_000)})
    return folder


def run(*arguments: object) -> Result:
    done = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--seconds", "0.3"])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_latency_and_bandwidth_are_those_of_the_store(seaweedfs_server: Server, packed: Path) -> None:
    url = str(upload(packed, f"{seaweedfs_server.url}/{uuid.uuid4().hex}", seaweedfs_server.options))
    script = Script(latency_s=0.05, connection_bytes_per_s=2e6)
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port, script) as proxy:
        options = seaweedfs_server.behind(proxy.host, proxy.port).options
        arguments = [f"--storage-option={name}={value}" for name, value in options.items()]
        found = json.loads(run(url, "--json", *arguments).stdout)
    assert found["latency_s"] >= 0.05
    assert found["bytes_per_s"]["1"] <= 2.2e6, "one connection is limited"
    assert found["bytes_per_s"]["16"] > 4 * found["bytes_per_s"]["1"], "several are not"
    assert found["saturated_by"] > 2
    assert found["samples_per_s"] == pytest.approx(max(found["bytes_per_s"].values()) / found["bytes_per_sample"])


@pytest.mark.parametrize(("rate", "verdict"), [(1, "fast enough"), (1e9, "too slow: cache the data")])
def test_it_says_whether_the_store_is_fast_enough(packed: Path, rate: float, verdict: str) -> None:
    output = run(packed, "--rate", rate).stdout
    assert verdict in output
    assert "ms for one byte" in output
