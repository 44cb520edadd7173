"""The servers answer obstore, and end with the process that started them. Other tests state the laws of storage.

No test here forks after it has used obstore, whose threads would be missing in the fork.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError
from obstore.store import ObjectStore, from_url

from tests.faults.proxy import FaultProxy, Script
from tests.servers.fixtures import (
    WebServer,
    azurite_server,
    fake_gcs_server,
    moto_server,
    nginx_server,
    seaweedfs_server,
)
from tests.servers.server import HOST, Server, answers, find_free_port, run_server

__all__ = ["azurite_server", "fake_gcs_server", "moto_server", "nginx_server", "seaweedfs_server"]

CONTENT = bytes(range(256)) * 40

RUN_SERVER = """
import sys
from pathlib import Path
from tests.servers.server import answers, run_server
port, folder = sys.argv[1:]
command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", port]
with run_server(command, Path(folder), lambda: answers(f"http://127.0.0.1:{port}/")):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(params=["seaweedfs", "moto", "fake_gcs", "azurite"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each object store."""
    found = request.getfixturevalue(f"{request.param}_server")
    assert isinstance(found, Server)
    return found


def open_store(server: Server, **changed: str) -> ObjectStore:
    """Return obstore's store of a server. obstore takes options of the connection apart from those of the store."""
    config: Any = {**server.options, **changed}  # Which type it has depends on the URL.
    allow_http = config.pop("allow_http") == "true"
    return from_url(server.url, config=config, client_options={"allow_http": allow_http})


def test_object_stores_put_read_list_and_delete(server: Server) -> None:
    store = open_store(server)
    obstore.put(store, "put/a b/1", CONTENT)
    obstore.put(store, "put/2", b"")
    e_tag = obstore.head(store, "put/a b/1")["e_tag"]
    assert e_tag is not None
    found = obstore.get(store, "put/a b/1", options={"range": (300, 400), "if_match": e_tag})
    assert found.range == (300, 400)
    assert bytes(found.bytes()) == CONTENT[300:400]
    with pytest.raises(PreconditionError):
        obstore.get(store, "put/a b/1", options={"range": (300, 400), "if_match": '"other"'})

    listed = obstore.list_with_delimiter(store, "put")
    assert list(listed["common_prefixes"]) == ["put/a b"]
    assert [(each["path"], each["size"]) for each in listed["objects"]] == [("put/2", 0)]

    obstore.delete(store, ["put/a b/1", "put/2"])
    with pytest.raises(FileNotFoundError):
        obstore.head(store, "put/2")
    assert not obstore.list_with_delimiter(store, "put")["objects"]


def test_object_stores_create_only_what_is_missing(server: Server) -> None:
    store = open_store(server)
    obstore.put(store, "create", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "create", b"2", mode="create")
    assert bytes(obstore.get(store, "create").bytes()) == b"1"


def test_object_stores_join_parts(server: Server) -> None:
    store = open_store(server)
    content = CONTENT * 1_200
    obstore.put(store, "parts", content, use_multipart=True)
    assert bytes(obstore.get(store, "parts").bytes()) == content


def test_object_stores_work_through_a_proxy(server: Server) -> None:
    with FaultProxy(server.host, server.port) as proxy:
        store = open_store(server.behind(proxy.host, proxy.port))
        obstore.put(store, "proxied/a b", CONTENT)
        obstore.put(store, "proxied/parts", CONTENT * 600, use_multipart=True)
        assert [each["size"] for each in obstore.list(store, "proxied").collect()] == [len(CONTENT), len(CONTENT) * 600]
        assert bytes(obstore.get_range(store, "proxied/a b", start=300, end=400)) == CONTENT[300:400]
        requests = proxy.requests()
        assert "bytes=300-399" in [request.range for request in requests]
        assert {request.fault for request in requests} == {None}


@pytest.mark.parametrize("kind", ["too_long", "wrong_range"])
def test_a_proxy_gets_other_ranges_in_spite_of_signatures(server: Server, kind: str) -> None:
    store = open_store(server)
    obstore.put(store, "ranges", CONTENT)
    with FaultProxy(server.host, server.port, Script(faults={kind: 1.0}, max_faults=1)) as proxy:
        spoiled = open_store(server.behind(proxy.host, proxy.port))
        with pytest.raises(GenericError, match=r"range|Requested 300\.\.400"):
            obstore.get_range(spoiled, "ranges", start=300, end=400)
        assert proxy.counts().num_faults == {kind: 1}
        assert bytes(obstore.get_range(spoiled, "ranges", start=300, end=400)) == CONTENT[300:400]


def test_seaweedfs_refuses_wrong_credentials_and_lets_anyone_read(seaweedfs_server: Server) -> None:
    obstore.put(open_store(seaweedfs_server), "anyone", b"1")
    wrong = open_store(seaweedfs_server, secret_access_key="wrong")
    with pytest.raises(PermissionDeniedError):
        obstore.head(wrong, "anyone")
    anyone = open_store(seaweedfs_server, skip_signature="true")
    assert bytes(obstore.get(anyone, "anyone").bytes()) == b"1"
    with pytest.raises(PermissionDeniedError):
        obstore.put(anyone, "anyone", b"2")


def test_nginx_serves_ranges(nginx_server: WebServer) -> None:
    (nginx_server.files / "a").write_bytes(CONTENT)
    store = open_store(nginx_server.server)
    e_tag = obstore.head(store, "a")["e_tag"]
    assert e_tag is not None
    found = obstore.get(store, "a", options={"range": (300, 400), "if_match": e_tag})
    assert bytes(found.bytes()) == CONTENT[300:400]
    with pytest.raises(PreconditionError):
        obstore.get(store, "a", options={"range": (300, 400), "if_match": '"other"'})


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('the disk is full')"]
    with (
        pytest.raises(RuntimeError, match=r"ended with status 1(.|\n)*the disk is full"),
        run_server(command, tmp_path, lambda: answers(f"http://{HOST}:{find_free_port()}/")),
    ):
        pass


def is_listened_to(port: int) -> bool:
    try:
        return answers(f"http://{HOST}:{port}/")
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return True  # It ended while it answered.


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path, end: signal.Signals) -> None:
    port = find_free_port()
    tests = subprocess.Popen(
        [sys.executable, "-c", RUN_SERVER, str(port), tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == b"ready\n"
        tests.send_signal(end)
    while is_listened_to(port):
        pass


def test_a_server_behind_a_proxy_has_its_address() -> None:
    server = Server(url="http://127.0.0.1:9", options={"endpoint": "http://127.0.0.1:9/a"}, port=9)
    assert server.behind("127.0.0.1", 8) == Server(
        url="http://127.0.0.1:8", options={"endpoint": "http://127.0.0.1:8/a"}, port=8
    )
