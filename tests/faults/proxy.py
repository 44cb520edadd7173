"""An HTTP proxy that delays, limits and disrupts a server's responses according to a script.

The proxy runs in a separate process, with one thread for each connection. The test controls it through an inherited
socket, and the process ends when the socket is closed.

with FaultProxy(server.host, server.port, Script(latency_s=0.02, faults={"status_503": 0.1})) as proxy:
    store = open_store(server.behind(proxy.host, proxy.port))
    ...
    assert proxy.counts().num_faults["status_503"] > 0
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection as Control
from pathlib import Path

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 10.0

OWN_ANSWERS = ("status_500", "status_503", "status_429", "expired_token", "changed_object")
"""Faults for which the proxy answers by itself, without the server."""

BEFORE_RESPONSE = ("reset_before", "stall_before")
"""Faults before the first byte of a response. When a reset occurs, the server has already answered; when a stall
occurs, it has not."""

OTHER_RANGES = ("too_long", "wrong_range")
"""Faults for which the proxy requests a different range, so the server must not check signatures."""

IN_BODY = ("reset_in_body", "stall_in_body", "truncated", "wrong_length", "corrupt")
"""Faults in a response's body."""

KINDS = (*OWN_ANSWERS, *BEFORE_RESPONSE, *OTHER_RANGES, *IN_BODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The behavior of a fault proxy. The same seed and order of requests give the same faults."""

    seed: int = 0
    latency_s: float = 0.0  # Minimum time from the end of a request's head to the response.
    connection_bytes_per_s: float | None = None  # None means no limit.
    # For each kind of fault, the probability that a request has it. Some responses cannot have certain faults: a 1-byte
    # body is never truncated.
    faults: Mapping[str, float] = field(default_factory=dict)
    methods: tuple[str, ...] = ("GET",)  # Only requests with these methods have faults.
    max_faults: int | None = None  # None means no limit.

    def __post_init__(self) -> None:
        assert set(self.faults) <= set(KINDS)
        assert sum(self.faults.values()) <= 1 + 1e-9


@dataclass(slots=True)
class LoggedRequest:
    method: str
    path: str
    range: str | None
    status: int | None = None
    num_bytes: int = 0
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    num_requests: int
    num_bytes: int
    num_faults: Mapping[str, int]


class FaultProxy:
    """A fault proxy whose process ends with the context, or with this process."""

    host = "127.0.0.1"

    def __init__(self, host: str, port: int, script: Script | None = None) -> None:
        self._server = host, port
        self._script = script or Script()
        self.port = 0  # The context sets the port when it is entered.

    def __enter__(self) -> FaultProxy:
        ours, theirs = socket.socketpair()
        run = f"from tests.faults.proxy import main; main({theirs.fileno()}, {self._server!r})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", run],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the tests, which then end the proxy.
            )
        self._control = Control(ours.detach())
        self.set(self._script)
        self.port = self._control.recv()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # A fork may keep a copy of the socket open, so closing it is not enough.
            self._control.send("end")
        self._control.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()

    def _call(self, command: Script | str) -> list[LoggedRequest]:
        self._control.send(command)
        return self._control.recv()  # type: ignore[no-any-return]  # It came through a socket.

    def set(self, script: Script) -> None:
        self._call(script)

    def requests(self) -> list[LoggedRequest]:
        return self._call("requests")

    def reset(self) -> None:
        self._call("reset")

    def counts(self) -> Counts:
        requests = self.requests()
        faults = Counter(each.fault for each in requests if each.fault is not None)
        return Counts(len(requests), sum(each.num_bytes for each in requests), faults)


PIECE_BYTES = 64 << 10
MAX_LATE_S = 0.01

ERRORS = {
    "status_500": (500, "InternalError"),
    "status_503": (503, "SlowDown"),
    "status_429": (429, "TooManyRequests"),
    "expired_token": (403, "ExpiredToken"),
    "changed_object": (412, "PreconditionFailed"),
    "no_server": (502, "BadGateway"),
}


class Turn:
    """One request: its log entry, the earliest time of its response, and a fault with its place in the body."""

    def __init__(self, log: LoggedRequest, script: Script, fault: str | None, place: float) -> None:
        self.log, self.script, self.fault, self.place = log, script, fault, place
        self.ready_at = self._free_at = time.monotonic() + script.latency_s
        self._has_begun = False

    def carry(self, num_bytes: int) -> None:
        """Wait until the connection has carried the next bytes of the body. Idle time does not speed up later bytes."""
        rate, now = self.script.connection_bytes_per_s, time.monotonic()
        # Compensate only for short delays, such as those of sleep.
        earliest = now - MAX_LATE_S if self._has_begun else max(now, self.ready_at)
        self._free_at, self._has_begun = max(self._free_at, earliest), True
        if rate is not None:
            self._free_at += num_bytes / rate
        sleep_until(self._free_at)
        self.log.num_bytes += num_bytes


def sleep_until(when: float) -> None:
    if (delay_s := when - time.monotonic()) > 0:
        time.sleep(delay_s)


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.upstream, self._lock = upstream, threading.Lock()
        self.set_script(Script())
        self.log = deque[LoggedRequest](maxlen=100_000)

    def shutdown_request(self, request: object) -> None:
        request.close()  # type: ignore[attr-defined]  # A socket. Shutting it down first would send an end, not a reset.

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError | HTTPException):  # Either side may end a connection.
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # a socket

    def set_script(self, script: Script) -> None:
        self._script, self._random, self._num_chosen = script, random.Random(f"faults {script.seed}"), 0

    def admit(self, log: LoggedRequest) -> Turn:
        with self._lock:
            self.log.append(log)
            return Turn(log, self._script, *self._choose_fault(log.method))

    def _choose_fault(self, method: str) -> tuple[str | None, float]:
        script = self._script
        if not script.faults or method not in script.methods:
            return None, 0.0
        number, place = self._random.random(), self._random.random()
        if script.max_faults is not None and self._num_chosen >= script.max_faults:
            return None, 0.0
        for kind, probability in sorted(script.faults.items()):
            number -= probability
            if number < 0:
                self._num_chosen += 1
                return kind, place
        return None, 0.0

    def obey(self, command: Script | str) -> list[LoggedRequest]:
        with self._lock:
            if isinstance(command, Script):
                self.set_script(command)
            elif command == "reset":
                self.log.clear()
            return list(self.log) if command == "requests" else []


class Handler(BaseHTTPRequestHandler):
    """One connection of a client, with its own connection to the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def setup(self) -> None:
        super().setup()
        self._upstream = HTTPConnection(*self.server.upstream)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self._turn = turn = self.server.admit(LoggedRequest(self.command, self.path, self.headers.get("Range")))
        body, fault = self._read_body(), turn.fault
        if fault in OWN_ANSWERS:
            turn.log.fault = fault
            self._answer_error(fault)
        elif fault == "stall_before":
            turn.log.fault = fault
            self._wait_until_closed()
        elif fault in OTHER_RANGES and (response := self._ask_other()):
            turn.log.fault = fault
            self._pass_on(response)
        else:
            try:
                response = self._ask(self.headers.items(), body)
            except ConnectionRefusedError:
                return self._answer_error("no_server")
            if fault == "reset_before":
                turn.log.fault = fault
                sleep_until(turn.ready_at)
                self._reset()
            elif fault in IN_BODY:
                self._spoil(response, fault)
            else:
                self._pass_on(response)
        return None

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") is None:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while num_bytes := int(self.rfile.readline(), 16):
            body += self.rfile.read(num_bytes)
            self.rfile.readline()
        self.rfile.readline()  # No client sends a trailer.
        return body

    def _answer_error(self, kind: str) -> None:
        """Answer with an error in S3's format."""
        status, code = ERRORS[kind]
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>The fault proxy says so.</Message><RequestId>0</RequestId></Error>"
        ).encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        headers += [("Retry-After", "1")] if kind == "status_429" else []
        self._send(status, headers, [] if self.command == "HEAD" else [body])

    def _ask(self, headers: Iterable[tuple[str, str]], body: bytes = b"") -> HTTPResponse:
        if self._upstream.sock and select.select([self._upstream.sock], [], [], 0)[0]:
            self._upstream.close()  # The server has ended the connection.
        self._upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            is_chunked = name.lower() == "transfer-encoding"
            self._upstream.putheader(*(("Content-Length", str(len(body))) if is_chunked else (name, value)))
        self._upstream.endheaders(body)
        return self._upstream.getresponse()

    def _ask_other(self) -> HTTPResponse | None:
        """Request a different range than the client did; return None if the server refuses.

        The change invalidates the request's signature.
        """
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None:
            return None
        start, last, is_whole = int(asked[1]), int(asked[2]), self._turn.fault == "too_long"
        other, length = int(self._turn.place * start) if start else 1, last + 1 - start
        changed = [(name, value) for name, value in self.headers.items() if name.lower() != "range"]
        changed += [] if is_whole else [("Range", f"bytes={other}-{other + length - 1}")]
        for headers in (changed, [each for each in changed if each[0].lower() != "authorization"]):
            response = self._ask(headers)
            if response.status == (200 if is_whole else 206) and (is_whole or response.length == length):
                return response
            self._upstream.close()
        return None

    def _pass_on(self, response: HTTPResponse) -> None:
        if response.length is None:  # The body is sent in chunks, or ends when the connection closes.
            body = response.read()
            self._send(response.status, with_length(response, len(body)), [body])
        else:
            self._send(response.status, response.getheaders(), iter(partial(response.read, PIECE_BYTES), b""))

    def _send(self, status: int, headers: Iterable[tuple[str, str]], pieces: Iterable[bytes]) -> None:
        sleep_until(self._turn.ready_at)
        self._turn.log.status = status
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        for piece in pieces:
            self._turn.carry(len(piece))
            self.wfile.write(piece)

    def _spoil(self, response: HTTPResponse, fault: str) -> None:
        body = response.read()
        if len(body) < 2:
            self._send(response.status, response.getheaders(), [body])
            return
        self._turn.log.fault = fault
        end = 1 + int(self._turn.place * (len(body) - 1))
        spoiled = body[:end]
        if fault == "corrupt":
            spoiled = body[: end - 1] + bytes([body[end - 1] ^ 1 << end % 8]) + body[end:]
        headers = with_length(response, end if fault == "wrong_length" else len(body))
        self._send(response.status, headers, [spoiled])
        self.close_connection |= fault not in ("corrupt", "wrong_length")
        if fault == "stall_in_body":
            self._wait_until_closed()
        elif fault == "reset_in_body":
            self._reset()

    def _wait_until_closed(self) -> None:
        self.close_connection = True
        while self.connection.recv(PIECE_BYTES):
            pass

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def with_length(response: HTTPResponse, length: int) -> list[tuple[str, str]]:
    others = ("content-length", "transfer-encoding")
    headers = [(name, value) for name, value in response.getheaders() if name.lower() not in others]
    return [*headers, ("Content-Length", str(length))]


def main(control_fd: int, upstream: tuple[str, int]) -> None:
    control, proxy = Control(control_fd), Proxy(upstream)
    control.send(proxy.obey(control.recv()))
    control.send(proxy.server_address[1])
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    with contextlib.suppress(EOFError):
        while (command := control.recv()) != "end":
            control.send(proxy.obey(command))
    os._exit(0)  # Threads may wait forever.
