"""The fault proxy passes everything on unchanged, counts it, and keeps to its limits."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults.proxied import (
    CONTENT,
    PART,
    RANGE,
    ask,
    ask_for_part,
    ask_once,
    connect,
    exchange,
    one_proxy,
    one_server,
    proxy,
    server,
)
from tests.faults.proxy import Counts, FaultProxy, LoggedRequest, Script
from tests.faults.range_server import RangeServer

__all__ = ["one_proxy", "one_server", "proxy", "server"]


@pytest.mark.parametrize(
    "line",
    [
        *(f"GET {path}" for path in ("/object", "/chunked", "/until-close", "/empty", "/one?a=b%20c", "/missing")),
        *(f"HEAD {path}" for path in ("/object", "/empty", "/missing")),
        "DELETE /other",
    ],
)
def test_answers_and_requests_pass_unchanged(server: RangeServer, proxy: FaultProxy, line: str) -> None:
    for headers in ("", "Range: bytes=5-9\r\n"):
        headers += "Host: a.b:1\r\nX-Odd:  x \r\nConnection: close"
        request = f"{line} HTTP/1.1\r\n{headers}\r\n\r\n".encode()
        assert exchange(proxy.port, request) == exchange(server.port, request)
        assert server.received[-1] == server.received[-2]


def test_connections_stay_open_on_both_sides(server: RangeServer, proxy: FaultProxy) -> None:
    with connect(proxy.port) as connection:
        for _ in range(3):
            assert ask(connection)[2] == CONTENT
            assert ask(connection, path="/chunked")[2] == CONTENT
            assert ask(connection, "HEAD")[1]["Content-Length"] == "100000"
            assert ask(connection, headers=RANGE)[2] == PART
            assert ask(connection, "DELETE", "/x")[0] == 204
        assert len(server.connections) == 1
        assert proxy.counts().num_connections == 1


def test_request_bodies_pass_unchanged(server: RangeServer, proxy: FaultProxy) -> None:
    with connect(proxy.port) as connection:
        content = random.Random(1).randbytes(3_000_000)
        assert ask(connection, "PUT", "/1", body=content)[0] == 200
        assert ask(connection, "PUT", "/2", body=iter([content, b"end"]), encode_chunked=True)[0] == 200
        assert ask(connection, "PUT", "/3", body=content, headers={"Expect": "100-continue"})[0] == 200
        assert (server.objects["/1"], server.objects["/2"], server.objects["/3"]) == (
            content,
            content + b"end",
            content,
        )
        assert ask(connection, path="/1")[2] == content


def test_many_connections_at_once(proxy: FaultProxy) -> None:
    proxy.set(Script(latency_s=0.005, connection_bytes_per_s=100e6, total_bytes_per_s=200e6))
    with ThreadPoolExecutor(20) as threads:
        found = list(threads.map(lambda _: ask_for_part(proxy)[2], range(60)))
    assert set(found) == {PART}
    assert proxy.counts().num_bytes == 60 * len(PART)


def test_counts_and_logs(proxy: FaultProxy) -> None:
    with connect(proxy.port) as connection:
        ask(connection, headers=RANGE)
        ask(connection, path="/one?a=b%20c")
        ask(connection, "HEAD", "/missing")
        before = proxy.counts()
        assert (before.num_requests, before.num_connections, before.num_bytes) == (3, 1, len(PART) + 1)
        assert proxy.requests() == [
            LoggedRequest(
                method="GET", path="/object", range=RANGE["Range"], status=206, num_bytes=len(PART), fault=None
            ),
            LoggedRequest(method="GET", path="/one?a=b%20c", range=None, status=200, num_bytes=1, fault=None),
            LoggedRequest(method="HEAD", path="/missing", range=None, status=404, num_bytes=0, fault=None),
        ]
        proxy.reset()
        after = proxy.counts()
        assert after == Counts(num_requests=0, num_connections=0, num_bytes=0, num_faults={}, cpu_s=after.cpu_s)
        assert after.cpu_s >= before.cpu_s > 0
        assert proxy.requests() == []


def test_answers_come_no_earlier_than_the_script_says(proxy: FaultProxy) -> None:
    def measure(script: Script) -> float:
        proxy.set(script)
        with connect(proxy.port) as connection:
            start = time.monotonic()
            assert ask(connection)[2] == CONTENT
            return time.monotonic() - start

    assert measure(Script(latency_s=0.05)) >= 0.05
    assert measure(Script(latency_s=0.05, connection_bytes_per_s=1e6)) >= 0.15
    assert measure(Script(latency_s=0.05, total_bytes_per_s=1e6)) >= 0.15


def test_all_connections_share_the_total_bandwidth(proxy: FaultProxy) -> None:
    proxy.set(Script(total_bytes_per_s=2e6))
    start = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(lambda _: ask_for_part(proxy), range(8)))) == 8
    assert time.monotonic() - start >= 8 * len(PART) / 2e6 - 0.05  # What it was late, it makes up for.


def test_a_missing_server_is_a_bad_gateway() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with FaultProxy("127.0.0.1", port) as proxy:
        assert ask_for_part(proxy)[0] == 502


def test_the_proxy_ends_with_its_context(server: RangeServer) -> None:
    with FaultProxy(server.host, server.port) as proxy:
        ask_once(proxy)
        with connect(proxy.port) as connection:
            connection.connect()
            port = proxy.port
    assert not is_listened_to(port)


def is_listened_to(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


RUN_PROXY = """
import sys
from tests.faults.proxy import FaultProxy
with FaultProxy("127.0.0.1", 9) as proxy:
    print(proxy.port, flush=True)
    sys.stdin.read()
"""


def test_the_proxy_ends_with_a_killed_test() -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", RUN_PROXY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as tests:
        assert tests.stdout is not None
        port = int(tests.stdout.readline())
        tests.send_signal(signal.SIGKILL)
        tests.stdout.read()  # The proxy has this pipe, too.
    while is_listened_to(port):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faults": {"status_418": 1.0}}, r"unknown kinds \['status_418'\]: use some of status_500"),
        ({"faults": {"corrupt": 0.7, "truncated": 0.7}}, "in total at most 1"),
        ({"faults": {"corrupt": -0.1}}, "at least 0"),
        ({"total_bytes_per_s": 0}, "total_bytes_per_s must be positive"),
    ],
)
def test_wrong_scripts_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Script(**options)
