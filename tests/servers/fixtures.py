"""Fixtures of running servers, each of which starts at most once in a test process. Import those that you need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers import azurite, fake_gcs, moto, nginx, seaweedfs
from tests.servers.fake_hub import FakeHub, run_fake_hub
from tests.servers.server import Server

Run = AbstractContextManager[Server]

MISSING = "{} is not installed: run bash tools/servers.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebServer:
    """A web server and the folder that it serves."""

    server: Server
    files: Path


def _fixture_of(name: str, is_installed: Callable[[], bool], run: Callable[[Path], Run]) -> Any:
    """Return the fixture of a server with an empty bucket."""

    @pytest.fixture(scope="session")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        if not is_installed():
            pytest.skip(MISSING.format(name))
        with run(tmp_path_factory.mktemp("server")) as running:
            yield running

    return server


seaweedfs_server = _fixture_of("SeaweedFS", seaweedfs.is_installed, seaweedfs.run_seaweedfs)
moto_server = _fixture_of("moto", moto.is_installed, moto.run_moto)
fake_gcs_server = _fixture_of("moto", fake_gcs.is_installed, fake_gcs.run_fake_gcs)
azurite_server = _fixture_of("Azurite", azurite.is_installed, azurite.run_azurite)


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
