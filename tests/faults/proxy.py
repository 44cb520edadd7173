"""A proxy between a client and an HTTP server that delays, limits and spoils responses according to a script.

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Control
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 10.0

OWN_ANSWERS = ("status_500", "status_503", "status_429", "expired_token", "changed_object")
"""Faults for which the proxy answers by itself, without the server."""

BEFORE_RESPONSE = ("reset_before", "stall_before")
"""Faults before the first byte of a response. When a reset occurs, the server has already answered; when a stall
occurs, it has not."""

OTHER_RANGES = ("too_long", "wrong_range")
"""Faults for which the proxy requests another range, so the server must not check signatures."""

IN_BODY = ("reset_in_body", "stall_in_body", "truncated", "wrong_length", "corrupt")
"""Faults in a response's body."""

KINDS = (*OWN_ANSWERS, *BEFORE_RESPONSE, *OTHER_RANGES, *IN_BODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How a fault proxy behaves. The same seed and order of requests give the same faults."""

    seed: int = 0
    latency_s: float = 0.0  # Minimum time from the end of a request's head to the response.
    connection_bytes_per_s: float | None = None  # None means no limit.
    # For each kind of fault, the probability that a request has it. Some responses cannot have a fault: a body of 1
    # byte is never truncated.
    faults: Mapping[str, float] = field(default_factory=dict)
    methods: tuple[str, ...] = ("GET",)  # Only these have faults.
    max_faults: int | None = None  # None means no limit.

    def __post_init__(self) -> None:
        assert set(self.faults) <= set(KINDS)
        assert sum(self.faults.values()) <= 1 + 1e-9


@dataclass(slots=True, kw_only=True)
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
        self._control.send(self._script)
        self.port = self._control.recv()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # A fork may keep a copy of the socket open, so closing it is not enough.
            self._control.send(("end", None))
        self._control.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait()

    def _call(self, command: str, script: Script | None = None) -> Any:
        self._control.send((command, script))
        return self._control.recv()

    def set(self, script: Script) -> None:
        self._call("set", script)

    def counts(self) -> Counts:
        return self._call("counts")  # type: ignore[no-any-return]  # it came through a socket

    def requests(self) -> list[LoggedRequest]:
        return self._call("requests")  # type: ignore[no-any-return]  # as above

    def reset(self) -> None:
        self._call("reset")


PIECE_BYTES = 256 << 10
MAX_LATE_S = 0.01
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
CLOSED_RANGE = re.compile(r"bytes=(\d+)-(\d+)")

ERRORS = {
    "status_500": ("500 Internal Server Error", "InternalError"),
    "status_503": ("503 Slow Down", "SlowDown"),
    "status_429": ("429 Too Many Requests", "TooManyRequests"),
    "expired_token": ("403 Forbidden", "ExpiredToken"),
    "changed_object": ("412 Precondition Failed", "PreconditionFailed"),
    "no_server": ("502 Bad Gateway", "BadGateway"),
}

Pieces = Iterator[tuple[bytes, bytes]]
"""The pieces of a body, each as the bytes to pass on and the content in these bytes."""


# The parts of HTTP/1.1 (RFC 9112) that a proxy needs: heads and the ends of bodies


def _header(name: str) -> re.Pattern[bytes]:
    return re.compile(rb"\r\n" + name.encode() + rb":[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)", re.IGNORECASE)


def find_header(head: bytes, name: str) -> str | None:
    found = _header(name).search(head)
    return found[1].decode("latin-1") if found else None


def set_header(head: bytes, name: str, value: str | None) -> bytes:
    rest = _header(name).sub(b"", head)
    return rest if value is None else rest[:-2] + f"{name}: {value}\r\n\r\n".encode("latin-1")


def find_length(head: bytes) -> int | None:
    found = find_header(head, "content-length")
    return None if found is None else int(found)


def is_chunked(head: bytes) -> bool:
    return "chunked" in (find_header(head, "transfer-encoding") or "").lower()


def wants_close(head: bytes) -> bool:
    return "close" in (find_header(head, "connection") or "").lower() or head.startswith(b"HTTP/1.0")


class Stream:
    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._file = connection, connection.makefile("rb")
        self.send = connection.sendall

    def read_line(self) -> bytes:
        line = self._file.readline()
        if not line.endswith(b"\r\n"):
            raise EOFError("the connection ended within a head or a line")
        return line

    def read_head(self) -> bytes:
        if not self._file.peek(1):
            return b""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self.read_line()
        return head

    def read_body(self, length: int | None, chunked: bool) -> Pieces:
        if length is not None:
            while length:
                piece = self._file.read1(min(length, PIECE_BYTES))
                if not piece:
                    raise EOFError(f"the connection ended {length} bytes before the end of the body")
                length -= len(piece)
                yield piece, piece
        elif chunked:
            while num_bytes := int((line := self.read_line()).split(b";")[0], 16):
                yield line, b""
                yield from self.read_body(num_bytes, False)
                yield self.read_line(), b""
            yield line, b""
            while line != b"\r\n":  # The trailer.
                line = self.read_line()
                yield line, b""
        else:
            while piece := self._file.read1(PIECE_BYTES):
                yield piece, piece

    def has_ended(self) -> bool:
        return bool(select.select([self._socket], [], [], 0)[0])

    def wait_until_closed(self) -> None:
        while self._socket.recv(PIECE_BYTES):
            pass

    def close(self, *, by_reset: bool = False) -> None:
        if by_reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._file.close()
        self._socket.close()


class Turn:
    """One request: its log entry, the earliest start of its response, and a fault with its place in the body."""

    def __init__(self, log: LoggedRequest, script: Script, fault: str | None, place: float) -> None:
        self.log, self.script, self.fault, self.place = log, script, fault, place
        self.ready_at = self._free_at = time.monotonic() + script.latency_s
        self._has_begun = False

    def carry(self, num_bytes: int) -> None:
        """Wait until the connection has carried the next bytes of the body. Idle time is not made up for."""
        rate, now = self.script.connection_bytes_per_s, time.monotonic()
        # Only short delays, such as those of sleep, are made up for.
        earliest = now - MAX_LATE_S if self._has_begun else max(now, self.ready_at)
        self._free_at, self._has_begun = max(self._free_at, earliest), True
        if rate is not None:
            self._free_at += num_bytes / rate
        sleep_until(self._free_at)


def sleep_until(when: float) -> None:
    if (delay_s := when - time.monotonic()) > 0:
        time.sleep(delay_s)


class Connection:
    def __init__(self, client: socket.socket, owner: Proxy) -> None:
        self._client, self._owner = Stream(client), owner
        self._server: Stream | None = None

    def serve(self) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):  # Closed files raise ValueError.
            while head := self._client.read_head():
                if not self._answer(head, self._owner.admit(head)) or wants_close(head):
                    break
        self._client.close()
        self._leave_server()

    def _answer(self, head: bytes, turn: Turn) -> bool:
        if turn.fault in OWN_ANSWERS:
            self._owner.note_fault(turn)
            return self._answer_error(head, turn, turn.fault)
        if turn.fault == "stall_before":
            self._owner.note_fault(turn)
            self._client.wait_until_closed()
        if turn.fault in OTHER_RANGES and (response := self._ask_other(head, turn)):
            self._owner.note_fault(turn)
            return self._pass_on(response, turn, self._read_response(head, response))
        try:
            response = self._ask(head)
        except ConnectionRefusedError:
            return self._answer_error(head, turn, "no_server")
        if turn.fault == "reset_before":
            self._owner.note_fault(turn)
            sleep_until(turn.ready_at)
            self._client.close(by_reset=True)
            return False
        pass_on = self._spoil if turn.fault in IN_BODY else self._pass_on
        return pass_on(response, turn, self._read_response(head, response))

    def _answer_error(self, head: bytes, turn: Turn, kind: str) -> bool:
        """Read the whole request, and answer it with an error in S3's format."""
        for _ in self._read_request(head):
            pass
        line, code = ERRORS[kind]
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>The fault proxy says so.</Message><RequestId>0</RequestId></Error>"
        ).encode()
        wait = "Retry-After: 1\r\n" if kind == "status_429" else ""
        answer = f"HTTP/1.1 {line}\r\nContent-Type: application/xml\r\n{wait}Content-Length: {len(body)}\r\n\r\n"
        turn.log.status = int(line[:3])
        content = b"" if head.startswith(b"HEAD ") else body
        self._owner.note_bytes(turn, len(content))
        sleep_until(turn.ready_at)
        self._client.send(answer.encode() + content)
        return True

    def _read_request(self, head: bytes) -> Iterator[bytes]:
        if find_header(head, "expect"):
            self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunked = is_chunked(head)
        for raw, _ in self._client.read_body(find_length(head) if chunked else find_length(head) or 0, chunked):
            yield raw

    def _ask(self, head: bytes) -> bytes:
        if self._server is None or self._server.has_ended():
            self._leave_server()
            self._server = Stream(socket.create_connection(self._owner.server))
        self._server.send(head)
        if not head.startswith(b"GET "):
            for raw in self._read_request(head):
                self._server.send(raw)
        status = 0
        while status < 200:  # These are interim.
            found = STATUS.match(answer := self._server.read_head())
            if found is None:
                raise EOFError("the server ended the connection without a response")
            status = int(found[1])
        return answer

    def _ask_other(self, head: bytes, turn: Turn) -> bytes | None:
        """Request a different range than the client did; return None if the server refuses.

        The change invalidates the request's signature.
        """
        asked = CLOSED_RANGE.fullmatch(find_header(head, "range") or "")
        if asked is None:
            return None
        start, last = int(asked[1]), int(asked[2])
        other, length = int(turn.place * start) if start else 1, last + 1 - start
        is_whole = turn.fault == "too_long"
        changed = set_header(head, "Range", None if is_whole else f"bytes={other}-{other + length - 1}")
        for request in (changed, set_header(changed, "Authorization", None)):
            response = self._ask(request)
            if response[9:12] == (b"200" if is_whole else b"206") and (is_whole or find_length(response) == length):
                return response
            self._leave_server()
        return None

    def _read_response(self, head: bytes, response: bytes) -> Pieces:
        assert self._server is not None
        has_body = not head.startswith(b"HEAD ") and response[9:12] not in (b"204", b"304")
        length = find_length(response) if has_body else 0
        return self._server.read_body(length, has_body and is_chunked(response))

    def _pass_on(self, response: bytes, turn: Turn, pieces: Pieces) -> bool:
        turn.log.status = int(response[9:12])
        sleep_until(turn.ready_at)
        self._client.send(response)
        for raw, content in pieces:
            turn.carry(len(content))
            self._owner.note_bytes(turn, len(content))
            self._client.send(raw)
        if wants_close(response):
            self._leave_server()
        return not wants_close(response)

    def _spoil(self, response: bytes, turn: Turn, pieces: Pieces) -> bool:
        body, fault = b"".join(content for _, content in pieces), turn.fault
        if find_length(response) is None:
            response = set_header(set_header(response, "Transfer-Encoding", None), "Content-Length", str(len(body)))
        if len(body) < 2:
            return self._pass_on(response, turn, iter([(body, body)]))
        self._owner.note_fault(turn)
        end = 1 + int(turn.place * (len(body) - 1))
        if fault == "corrupt":
            body = body[: end - 1] + bytes([body[end - 1] ^ 1 << end % 8]) + body[end:]
            return self._pass_on(response, turn, iter([(body, body)]))
        body = body[:end]
        if fault == "wrong_length":
            response = set_header(response, "Content-Length", str(end))
        may_continue = self._pass_on(response, turn, iter([(body, body)]))
        if fault == "stall_in_body":
            self._client.wait_until_closed()
        elif fault == "reset_in_body":
            self._client.close(by_reset=True)
        return may_continue and fault == "wrong_length"

    def _leave_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class Proxy:
    def __init__(self, server: tuple[str, int], script: Script) -> None:
        self.server, self._lock = server, threading.Lock()
        self.reset()
        self.set_script(script)

    def reset(self) -> None:
        self._num_requests = self._num_bytes = 0
        self._faults_seen = Counter[str]()
        self._log = deque[LoggedRequest](maxlen=100_000)

    def set_script(self, script: Script) -> None:
        self._script, self._random, self._num_chosen = script, random.Random(f"faults {script.seed}"), 0

    def admit(self, head: bytes) -> Turn:
        method, path, *_ = head[: head.index(b"\r\n")].decode("latin-1").split(" ")
        with self._lock:
            fault, place = self._choose_fault(method)
            self._num_requests += 1
            self._log.append(LoggedRequest(method=method, path=path, range=find_header(head, "range")))
            return Turn(self._log[-1], self._script, fault, place)

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

    def note_fault(self, turn: Turn) -> None:
        assert turn.fault is not None
        with self._lock:
            turn.log.fault = turn.fault
            self._faults_seen[turn.fault] += 1

    def note_bytes(self, turn: Turn, num_bytes: int) -> None:
        with self._lock:
            turn.log.num_bytes += num_bytes
            self._num_bytes += num_bytes

    def accept(self, listener: socket.socket) -> None:
        while True:
            threading.Thread(target=Connection(listener.accept()[0], self).serve, daemon=True).start()

    def obey(self, command: str, script: Script) -> object:
        with self._lock:
            if command == "set":
                self.set_script(script)
            elif command == "reset":
                self.reset()
            elif command == "counts":
                return Counts(self._num_requests, self._num_bytes, dict(self._faults_seen))
            return list(self._log) if command == "requests" else None


def main(control_fd: int, server: tuple[str, int]) -> None:
    control = Control(control_fd)
    proxy = Proxy(server, control.recv())
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    threading.Thread(target=proxy.accept, args=(listener,), daemon=True).start()
    control.send(listener.getsockname()[1])
    with contextlib.suppress(EOFError):
        while (command := control.recv())[0] != "end":
            control.send(proxy.obey(*command))
    os._exit(0)  # Threads may wait forever.
