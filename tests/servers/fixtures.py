"""Fixtures of running servers, each of which starts at most once in a test process. Import those that you need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers import azurite, fake_gcs, moto, nginx, seaweedfs
from tests.servers.fake_hub import FakeHub, run_fake_hub
from tests.servers.server import Server

MISSING = "{} is not installed: run bash tools/servers.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebServer:
    """A web server and the folder that it serves."""

    server: Server
    files: Path


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS, with an empty bucket."""
    if not seaweedfs.is_installed():
        pytest.skip(MISSING.format("SeaweedFS"))
    with seaweedfs.run_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """moto's S3, with an empty bucket."""
    if not moto.is_installed():
        pytest.skip(MISSING.format("moto"))
    with moto.run_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def fake_gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The emulation of Google Cloud Storage, with an empty bucket."""
    if not fake_gcs.is_installed():
        pytest.skip(MISSING.format("moto"))
    with fake_gcs.run_fake_gcs(tmp_path_factory.mktemp("fake-gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Azurite, with an empty container."""
    if not azurite.is_installed():
        pytest.skip(MISSING.format("Azurite"))
    with azurite.run_azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture(scope="session")
def nginx_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    """nginx, with the empty folder that it serves."""
    if not nginx.is_installed():
        pytest.skip(MISSING.format("nginx"))
    files = tmp_path_factory.mktemp("nginx-files")
    with nginx.run_nginx(tmp_path_factory.mktemp("nginx"), files) as server:
        yield WebServer(server=server, files=files)


@pytest.fixture(scope="session")
def fake_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """The emulation of the Hugging Face Hub, without repositories."""
    with run_fake_hub(tmp_path_factory.mktemp("fake-hub")) as hub:
        yield hub
