"""The storage backends that pass the conformance suite. A new backend adds a line to BACKENDS or SERVERS."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardio.storage import Location, RemoteAccess, make_access, parse_location
from shardio.storage.client import client
from shardio.storage.locations import make_options
from tests.faults.proxy import FaultProxy, Script
from tests.servers.fixtures import azurite_server, fake_gcs_server, fake_hub, nginx_server, seaweedfs_server
from tests.servers.server import Server

__all__ = ["azurite_server", "fake_gcs_server", "fake_hub", "nginx_server", "seaweedfs_server"]

BACKENDS: dict[str, Callable[[Path], Location]] = {
    "local": parse_location,
    "memory": lambda folder: parse_location(f"memory://{uuid.uuid4().hex}/{folder.name}"),
    "cached": lambda folder: parse_location(
        f"memory://{uuid.uuid4().hex}/{folder.name}", make_access(cache=folder / "cache", cache_size="100MB")
    ),
}
"""For each backend, a function that returns an empty folder. It may use a local directory."""

SERVERS = ["seaweedfs_server", "fake_gcs_server", "azurite_server"]  # The fixtures of real servers.


@pytest.fixture(params=BACKENDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty folder of each backend."""
    return BACKENDS[request.param](tmp_path)


@pytest.fixture(params=[*BACKENDS, *(pytest.param(name, marks=pytest.mark.slow) for name in SERVERS)])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """The same, and of each real server, for laws that depend on what is sent to one."""
    if request.param in BACKENDS:
        return BACKENDS[request.param](tmp_path)
    server: Server = request.getfixturevalue(request.param)
    return at_server(server, f"{uuid.uuid4().hex}/{tmp_path.name}")


@pytest.fixture(scope="session")
def one_proxy(seaweedfs_server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(one_proxy: FaultProxy) -> FaultProxy:
    one_proxy.set(Script())
    one_proxy.reset()
    return one_proxy


@pytest.fixture
def behind(seaweedfs_server: Server, proxy: FaultProxy) -> Server:
    return seaweedfs_server.behind(proxy.host, proxy.port)


def at_server(server: Server, key: str, **options: str | float) -> Location:
    access = RemoteAccess(options=make_options({**server.options, **options}))
    return parse_location(f"{server.url}/{key}", access)


def options_of(location: Location) -> dict[str, Any]:
    return dict(location.store.options.config)  # type: ignore[attr-defined]  # It is an ObjectStore.


def in_memory(key: str = "a") -> Location:
    return parse_location(f"memory://{uuid.uuid4().hex}/{key}")


def put(location: Location, content: bytes) -> Location:
    with location.write_whole() as file:
        file.write(content)
    return location


def put_all(folder: Path, target: Location) -> Location:
    for path in folder.rglob("*"):
        if path.is_file():
            put(target / path.relative_to(folder).as_posix(), path.read_bytes())
    return target


def storage_process_id() -> int:
    process = client()._process
    assert process is not None
    return process.pid
