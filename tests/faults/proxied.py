"""A server with a fault proxy in front of it, and ways to ask it."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.proxy import FaultProxy, Script
from tests.faults.range_server import RangeServer, run_range_server

CONTENT = random.Random(0).randbytes(100_000)
RANGE = {"Range": "bytes=1000-75999"}
PART = CONTENT[1_000:76_000]

Answer = tuple[int, dict[str, str], bytes]
"""A status, headers and a body."""


@pytest.fixture(scope="module")
def one_server() -> Iterator[RangeServer]:
    with run_range_server({}) as server:
        yield server


@pytest.fixture(scope="module")
def one_proxy(one_server: RangeServer) -> Iterator[FaultProxy]:
    with FaultProxy(one_server.host, one_server.port) as proxy:
        yield proxy


@pytest.fixture
def server(one_server: RangeServer) -> RangeServer:
    """The server, as it was at first."""
    one_server.objects.clear()
    one_server.objects.update(dict.fromkeys(("/object", "/chunked", "/until-close"), CONTENT))
    one_server.objects.update({"/empty": b"", "/one?a=b%20c": b"1"})
    one_server.received.clear()
    one_server.connections.clear()
    return one_server


@pytest.fixture
def proxy(server: RangeServer, one_proxy: FaultProxy) -> FaultProxy:
    """The proxy in front of it, without faults."""
    one_proxy.set(Script())
    one_proxy.reset()
    return one_proxy


def connect(port: int) -> contextlib.closing[http.client.HTTPConnection]:
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60))


def ask(connection: http.client.HTTPConnection, method: str = "GET", path: str = "/object", **options: Any) -> Answer:
    connection.request(method, path, **options)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def ask_once(proxy: FaultProxy, method: str = "GET", path: str = "/object", **options: Any) -> Answer:
    with connect(proxy.port) as connection:
        return ask(connection, method, path, **options)


def ask_for_part(proxy: FaultProxy) -> Answer:
    return ask_once(proxy, headers=RANGE)


def exchange(port: int, request: bytes) -> bytes:
    """Send bytes by a plain socket; return everything that comes back."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while received := connection.recv(1 << 20):
            answer += received
    return answer
