"""Whatever goes wrong on the way, the content is right, or an error says what failed."""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from shardio.errors import StoreError
from shardio.storage import Location, ReplacedError
from tests.faults.proxy import KINDS, FaultProxy, Script
from tests.servers.fixtures import seaweedfs_server
from tests.servers.seaweedfs import SECRET_ACCESS_KEY
from tests.servers.server import Server
from tests.storage.conftest import at_server

__all__ = ["seaweedfs_server"]

CONTENT = np.random.default_rng(0).bytes(3_000_000)
PATIENT = {"timeout_s": 0.3, "retries": 100}


@pytest.fixture(scope="module")
def proxy(seaweedfs_server: Server) -> Iterator[FaultProxy]:
    with FaultProxy(seaweedfs_server.host, seaweedfs_server.port) as proxy:
        yield proxy


@pytest.fixture
def root(seaweedfs_server: Server, proxy: FaultProxy) -> Location:
    """A folder in a store with a poor network."""
    proxy.set(Script())
    proxy.reset()
    return at_server(seaweedfs_server.behind(proxy.host, proxy.port), uuid.uuid4().hex, **PATIENT)


def put(location: Location, content: bytes = CONTENT) -> Location:
    with location.write_whole() as file:
        file.write(content)
    return location


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_are_right_in_spite_of_any_fault(root: Location, proxy: FaultProxy, kind: str) -> None:
    location = put(root / "a")
    with closing(location.open()) as file:
        proxy.set(Script(faults={kind: 0.3}))
        for start in range(0, len(CONTENT), 500_000):
            found = file.read(start, start + 500_000)
            if kind != "corrupt":  # Only a hash shows this: see test_damage.py.
                assert found == CONTENT[start : start + 500_000]
    assert proxy.counts().num_faults[kind]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("too_long", "wrong_range")])
def test_whole_objects_are_right_in_spite_of_any_fault(root: Location, proxy: FaultProxy, kind: str) -> None:
    locations = [put(root / str(i), CONTENT[: 1000 * i]) for i in range(1, 9)]
    proxy.set(Script(faults={kind: 0.3}))
    assert [each.read_whole() for each in locations] == [CONTENT[: 1000 * i] for i in range(1, 9)]
    assert proxy.counts().num_faults[kind]


def test_a_transfer_is_resumed_where_it_broke(root: Location, proxy: FaultProxy) -> None:
    location = put(root / "a")
    # Unlike a reset, this loses nothing that has arrived.
    proxy.set(Script(faults={"truncated": 1.0}, max_faults=5))
    proxy.reset()
    with closing(location.open()) as file:
        assert file.read(0, len(CONTENT)) == CONTENT
    starts = [int(found[1]) for each in proxy.requests() if (found := re.match(r"bytes=(\d+)-", each.range or ""))]
    assert starts == sorted(starts)
    assert max(starts) > 0, "a request begins in the middle"


@pytest.mark.parametrize("kind", ["status_500", "status_503", "status_429", "reset_before", "stall_before"])
@pytest.mark.parametrize("num_bytes", [1000, 20_000_000])
def test_uploads_are_right_in_spite_of_faults(root: Location, proxy: FaultProxy, kind: str, num_bytes: int) -> None:
    content = os.urandom(num_bytes)
    proxy.set(Script(faults={kind: 0.2}, methods=("PUT", "POST", "GET", "HEAD")))
    location = put(root / "a", content)
    proxy.set(Script())
    assert location.read_whole() == content
    assert root.list() == ["a"]


def test_a_store_that_keeps_failing_is_an_error_that_says_what_was_tried(
    seaweedfs_server: Server, proxy: FaultProxy
) -> None:
    server = seaweedfs_server.behind(proxy.host, proxy.port)
    location = put(at_server(server, uuid.uuid4().hex, retries=2))
    with closing(location.open()) as file:
        proxy.set(Script(faults={"status_503": 1.0}))
        with pytest.raises(StoreError) as caught:
            file.read(10, 1000)
    message = str(caught.value)
    assert re.fullmatch(
        rf"cannot read bytes 10 to 1000 of {location} after 3 attempts in \d+ s: the server answered 503 .*SlowDown"
        r".*\. Check the network and the server",
        message,
    ), message
    assert SECRET_ACCESS_KEY not in message
    proxy.set(Script())


def test_expired_credentials_are_an_error_that_says_so(seaweedfs_server: Server, proxy: FaultProxy) -> None:
    location = at_server(seaweedfs_server.behind(proxy.host, proxy.port), "a", retries=1)
    proxy.set(Script(faults={"expired_token": 1.0}))
    with pytest.raises(StoreError, match=r"ExpiredToken.*\. The credentials have expired: renew them"):
        location.read_whole()
    proxy.set(Script())


def test_wrong_credentials_are_an_error_that_does_not_show_them(seaweedfs_server: Server) -> None:
    options = {**seaweedfs_server.options, "secret_access_key": "a-wrong-secret"}
    location = at_server(Server(url=seaweedfs_server.url, options=options, port=seaweedfs_server.port), "a")
    with pytest.raises(
        PermissionError, match=r"s3://shardio/a: .*SignatureDoesNotMatch.*Check the credentials"
    ) as caught:
        location.stat()
    assert "a-wrong-secret" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://no-such-server.invalid:80"])
def test_a_server_that_never_answers_is_given_up_soon(seaweedfs_server: Server, endpoint: str) -> None:
    options = {**seaweedfs_server.options, "endpoint": endpoint}
    location = at_server(Server(url=seaweedfs_server.url, options=options, port=9), "a")
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"cannot read s3://shardio/a after 4 attempts .* Check the URL, the endpoint"):
        location.stat()
    assert time.monotonic() - began < 60, "not ten retries of a server that does not exist"


def test_a_replaced_object_is_not_read_as_the_old_one(root: Location) -> None:
    location = put(root / "a")
    with closing(location.open()) as file:
        put(location, CONTENT[::-1])
        with pytest.raises(ReplacedError, match=str(location)):
            file.read(0, 10)


def test_an_object_that_was_removed_is_missing(root: Location) -> None:
    location = put(root / "a")
    with closing(location.open()) as file:
        location.remove()
        with pytest.raises(FileNotFoundError, match=str(location)):
            file.read(0, 10)


def test_an_unknown_option_is_an_error(seaweedfs_server: Server) -> None:
    options = {**seaweedfs_server.options, "regoin": "x"}
    location = at_server(Server(url=seaweedfs_server.url, options=options, port=9), "a")
    with pytest.raises(ValueError, match=r"s3://shardio: .*regoin.*Check the storage options"):
        location.stat()
