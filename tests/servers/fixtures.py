"""Fixtures of running servers, each of which starts at most once in a test process. Import those that you need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.servers.fake_hub import FakeHub, run_fake_hub
from tests.servers.server import Server
from tests.servers.stores import AZURITE, MOTO, NGINX, PROGRAM, run_azurite, run_fake_gcs, run_nginx, run_seaweedfs

MISSING = "{} is not installed: run bash tools/servers.sh"


@dataclass(frozen=True, slots=True, kw_only=True)
class WebServer:
    server: Server
    files: Path


def _fixture_of(program: Path, run: Callable[[Path], AbstractContextManager[Server]]) -> Any:
    """Return the fixture of a server with an empty bucket."""

    @pytest.fixture(scope="session")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        if not program.exists():
            pytest.skip(MISSING.format(program.name))
        with run(tmp_path_factory.mktemp("server")) as running:
            yield running

    return server


seaweedfs_server = _fixture_of(PROGRAM, run_seaweedfs)
fake_gcs_server = _fixture_of(MOTO, run_fake_gcs)
azurite_server = _fixture_of(AZURITE, run_azurite)


@pytest.fixture(scope="session")
def nginx_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    if NGINX is None:
        pytest.skip(MISSING.format("nginx"))
    files = tmp_path_factory.mktemp("nginx-files")
    with run_nginx(tmp_path_factory.mktemp("nginx"), files) as server:
        yield WebServer(server=server, files=files)


@pytest.fixture(scope="session")
def fake_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    with run_fake_hub(tmp_path_factory.mktemp("fake-hub")) as hub:
        yield hub
