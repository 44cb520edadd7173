"""The storage backends that pass the conformance suite. A new backend adds a line to BACKENDS or SERVERS."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from shardio.storage import Location, RemoteAccess, make_access, parse_location
from shardio.storage.options import make_options
from tests.servers.fixtures import azurite_server, fake_gcs_server, moto_server, nginx_server, seaweedfs_server
from tests.servers.server import Server

__all__ = ["azurite_server", "fake_gcs_server", "moto_server", "nginx_server", "seaweedfs_server"]

BACKENDS: dict[str, Callable[[Path], Location]] = {
    "local": parse_location,
    "memory": lambda folder: parse_location(f"memory://{uuid.uuid4().hex}/{folder.name}"),
    "cached": lambda folder: parse_location(
        f"memory://{uuid.uuid4().hex}/{folder.name}", make_access(cache=folder / "cache", cache_size="100MB")
    ),
}
"""For each backend, a function that returns an empty folder. It may use a local directory."""

SERVERS = ["seaweedfs_server", "moto_server", "fake_gcs_server", "azurite_server"]
"""The fixtures of real servers."""


@pytest.fixture(params=[*BACKENDS, *SERVERS])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty folder of each backend."""
    if request.param in BACKENDS:
        return BACKENDS[request.param](tmp_path)
    server: Server = request.getfixturevalue(request.param)
    return at_server(server, f"{uuid.uuid4().hex}/{tmp_path.name}")


def at_server(server: Server, key: str, **options: float) -> Location:
    """Return a location in a server's bucket."""
    access = RemoteAccess(options=make_options({**server.options, **options}))
    return parse_location(f"{server.url}/{key}", access)
