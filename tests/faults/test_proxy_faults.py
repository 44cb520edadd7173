"""Each fault of the fault proxy does what it says, and the script determines when."""

from __future__ import annotations

import contextlib
import http.client
import socket

import pytest

from tests.faults.proxied import (
    CONTENT,
    PART,
    RANGE,
    ask,
    ask_for_part,
    ask_once,
    connect,
    one_proxy,
    one_server,
    proxy,
    server,
)
from tests.faults.proxy import KINDS, FaultProxy, Script
from tests.faults.range_server import RangeServer

__all__ = ["one_proxy", "one_server", "proxy", "server"]

ERRORS = {
    "status_500": (500, b"<Code>InternalError</Code>"),
    "status_503": (503, b"<Code>SlowDown</Code>"),
    "status_429": (429, b"<Code>TooManyRequests</Code>"),
    "expired_token": (403, b"<Code>ExpiredToken</Code>"),
    "changed_object": (412, b"<Code>PreconditionFailed</Code>"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_that_the_proxy_answers(server: RangeServer, proxy: FaultProxy, kind: str) -> None:
    proxy.set(Script(faults={kind: 1.0}, max_faults=1, methods=("GET", "PUT")))
    with connect(proxy.port) as connection:
        status, headers, body = ask(connection, "PUT", "/put", body=CONTENT)
        assert status == ERRORS[kind][0]
        assert ERRORS[kind][1] in body
        assert headers.get("Retry-After") == ("1" if kind == "status_429" else None)
        assert server.received == []
        assert ask(connection)[2] == CONTENT  # The connection is still good.
        assert proxy.counts().num_faults == {kind: 1}


def test_a_reset_before_the_response_follows_the_request(server: RangeServer, proxy: FaultProxy) -> None:
    proxy.set(Script(faults={"reset_before": 1.0}, methods=("PUT",)))
    with pytest.raises(ConnectionResetError):
        ask_once(proxy, "PUT", "/put", body=CONTENT)
    assert server.objects["/put"] == CONTENT
    assert proxy.requests()[0].status is None


def receive(proxy: FaultProxy, kind: str) -> tuple[bytes, type[OSError] | None]:
    """Ask for the part by a plain socket, with one fault. Return the answer, and the error that ended it."""
    proxy.set(Script(faults={kind: 1.0}, seed=3))
    answer = b""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as connection:
        connection.sendall(b"GET /object HTTP/1.1\r\nRange: bytes=1000-75999\r\n\r\n")
        while not proxy.counts().num_faults:
            pass
        if kind.startswith("stall"):
            connection.settimeout(0.2)
        try:
            while received := connection.recv(1 << 20):
                answer += received
        except OSError as error:
            return answer, type(error)
    return answer, None


def split(answer: bytes) -> tuple[bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head, body


def test_resets_in_the_body(proxy: FaultProxy) -> None:
    answer, error = receive(proxy, "reset_in_body")
    assert error is ConnectionResetError
    assert PART.startswith(split(answer)[1])
    assert 0 < proxy.requests()[0].num_bytes < len(PART)


def test_truncated_bodies_end_cleanly_before_the_length_that_they_announce(proxy: FaultProxy) -> None:
    answer, error = receive(proxy, "truncated")
    head, body = split(answer)
    assert error is None
    assert b"Content-Length: 75000" in head
    assert PART.startswith(body)
    assert len(body) == proxy.requests()[0].num_bytes < len(PART)


def test_stalls_send_nothing_more_and_keep_the_connection_open(proxy: FaultProxy) -> None:
    assert receive(proxy, "stall_before") == (b"", TimeoutError)
    proxy.reset()
    answer, error = receive(proxy, "stall_in_body")
    body = split(answer)[1]
    assert error is TimeoutError
    assert PART.startswith(body)
    assert len(body) == proxy.requests()[0].num_bytes < len(PART)
    assert ask_once(proxy, "HEAD")[0] == 200  # Others are served.


def test_wrong_lengths_look_whole(proxy: FaultProxy) -> None:
    proxy.set(Script(faults={"wrong_length": 1.0}, max_faults=1))
    with connect(proxy.port) as connection:
        status, headers, body = ask(connection, headers=RANGE)
        assert status == 206
        assert int(headers["Content-Length"]) == len(body) < len(PART)
        assert headers["Content-Range"] == "bytes 1000-75999/100000"
        assert PART.startswith(body)
        assert ask(connection, headers=RANGE)[2] == PART


def test_too_long_answers_are_the_whole_object(proxy: FaultProxy) -> None:
    proxy.set(Script(faults={"too_long": 1.0}))
    status, headers, body = ask_for_part(proxy)
    assert (status, body) == (200, CONTENT)
    assert "Content-Range" not in headers


def test_wrong_ranges_are_those_of_the_object(proxy: FaultProxy) -> None:
    for seed in range(4):
        proxy.set(Script(seed=seed, faults={"wrong_range": 1.0}))
        status, headers, body = ask_for_part(proxy)
        first, last = map(int, headers["Content-Range"].removeprefix("bytes ").removesuffix("/100000").split("-"))
        assert status == 206
        assert first != 1_000
        assert last + 1 - first == len(body) == len(PART)
        assert body == CONTENT[first : last + 1]


@pytest.mark.parametrize("path", ["/object", "/chunked"])
def test_corrupt_bodies_differ_in_one_bit(proxy: FaultProxy, path: str) -> None:
    proxy.set(Script(faults={"corrupt": 1.0}))
    status, _, body = ask_once(proxy, path=path)
    assert status == 200
    assert len(body) == len(CONTENT)
    difference = int.from_bytes(body, "big") ^ int.from_bytes(CONTENT, "big")
    assert difference.bit_count() == 1


def test_faults_that_an_answer_does_not_allow_do_not_happen(proxy: FaultProxy) -> None:
    with connect(proxy.port) as connection:
        for kind in ("truncated", "wrong_length", "corrupt", "reset_in_body", "stall_in_body"):
            proxy.set(Script(faults={kind: 1.0}))
            assert ask(connection, path="/empty")[2] == b""
            assert ask(connection, path="/one?a=b%20c")[2] == b"1"
        for kind in ("too_long", "wrong_range"):
            proxy.set(Script(faults={kind: 1.0}))
            assert ask(connection)[2] == CONTENT
            assert ask(connection, path="/missing", headers=RANGE)[0] == 404
        proxy.set(Script(faults={"wrong_range": 1.0}))
        whole = {"Range": "bytes=0-99999"}  # No other range is as long.
        assert ask(connection, headers=whole)[2] == CONTENT
        assert proxy.counts().num_faults == {}


MIXED = dict.fromkeys([kind for kind in KINDS if not kind.startswith("stall")], 0.07)


def faults_of(proxy: FaultProxy, script: Script, num_requests: int = 60) -> list[str | None]:
    proxy.set(script)
    proxy.reset()
    for _ in range(num_requests):
        with contextlib.suppress(OSError, http.client.HTTPException):
            ask_for_part(proxy)
    return [logged.fault for logged in proxy.requests()]


def test_the_seed_and_the_order_of_requests_determine_the_faults(proxy: FaultProxy) -> None:
    first = faults_of(proxy, Script(seed=1, faults=MIXED))
    assert len(set(first)) > 6
    assert faults_of(proxy, Script(seed=1, faults=MIXED)) == first
    assert faults_of(proxy, Script(seed=2, faults=MIXED)) != first
    counted = proxy.counts().num_faults
    assert counted == {kind: count for kind in KINDS if (count := [r.fault for r in proxy.requests()].count(kind))}


def test_only_chosen_requests_have_faults(proxy: FaultProxy) -> None:
    proxy.set(Script(faults={"status_500": 1.0}, path_pattern=r"ject$", max_faults=2))
    with connect(proxy.port) as connection:
        requests = [("GET", "/empty"), ("HEAD", "/object"), *3 * [("GET", "/object")]]
        assert [ask(connection, *request)[0] for request in requests] == [200, 200, 500, 500, 200]
        proxy.set(Script(faults={"status_500": 1.0}, methods=("HEAD",)))
        assert [ask(connection, *request)[0] for request in requests[1:3]] == [500, 200]
