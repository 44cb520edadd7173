"""Servers, a proxy that injects faults, and helpers that put objects into stores."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from shardio.storage import Location, RemoteAccess, make_direct_access, parse_location
from shardio.storage.client import client
from shardio.storage.copies import CachedCopy
from shardio.testing.store import put
from tests.faults.proxy import FaultProxy, Script
from tests.servers.server import Server, put_all

__all__ = ["put", "put_all"]


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
    return parse_location(f"{server.url}/{key}", make_direct_access({**server.options, **options}))


def options_of(location: Location) -> dict[str, Any]:
    return dict(location.store.options.config)  # type: ignore[attr-defined]  # It is an ObjectStore.


def in_memory(key: str = "a", access: RemoteAccess | None = None) -> Location:
    return parse_location(f"memory://{uuid.uuid4().hex}/{key}", access)


def storage_process_id() -> int:
    process = client()._process
    assert process is not None
    return process.pid


def write_copy(copy: CachedCopy, start: int, content: bytes) -> None:
    with copy.adding(start, start + len(content)) as addition:
        addition.write(start, memoryview(content))
        addition.mark()
