"""A proxy between a client and an HTTP server that delays, limits and spoils responses, as a script says.

with FaultProxy(server.host, server.port, Script(latency_s=0.02, faults={"status_503": 0.1})) as proxy:
    store = open_store(server.behind(proxy.host, proxy.port))
    ...
    assert proxy.counts().num_faults["status_503"] > 0
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Control
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 10.0

OWN_ANSWERS = ("status_500", "status_503", "status_429", "expired_token", "changed_object")
"""The proxy answers itself; the server never sees the request."""

BEFORE_RESPONSE = ("reset_before", "stall_before")
"""The server has answered before a reset, so a write has happened. It never sees a request that stalls."""

OTHER_RANGES = ("too_long", "wrong_range")
"""The server answers another request. It must serve objects without a signature, or ignore signatures."""

IN_BODY = ("reset_in_body", "stall_in_body", "truncated", "wrong_length", "corrupt")
"""The body differs from what the server sent, in length or in one bit."""

KINDS = (*OWN_ANSWERS, *BEFORE_RESPONSE, *OTHER_RANGES, *IN_BODY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How a fault proxy behaves. The same seed and order of requests give the same faults.

    Args:
        seed: The seed of all random choices.
        latency_s: The least time from the end of a request's head to the first byte of the response, in seconds. What
            the server itself takes is part of it.
        connection_bytes_per_s: The bandwidth of each connection's responses, or None for no limit.
        faults: The probability of each kind of fault per request, in total at most 1. A fault that a response does
            not allow, such as ``truncated`` for a body of less than 2 bytes, does not happen.
        methods: Only requests with these methods have faults.
        max_faults: The number of faults after which no more happen, or None for no limit.
    """

    seed: int = 0
    latency_s: float = 0.0
    connection_bytes_per_s: float | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    methods: tuple[str, ...] = ("GET",)
    max_faults: int | None = None

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
    """What has passed through a fault proxy: requests, bytes of bodies to clients, and faults of each kind."""

    num_requests: int
    num_bytes: int
    num_faults: Mapping[str, int]


class FaultProxy:
    """A fault proxy in a process of its own, which ends with the context, or with this process.

    Args:
        host: The server's address.
        port: The server's port.
        script: How the proxy behaves until :meth:`set`.
    """

    host = "127.0.0.1"

    def __init__(self, host: str, port: int, script: Script | None = None) -> None:
        self._server = host, port
        self._script = script or Script()
        self.port = 0
        """Where the proxy listens, within the context."""

    def __enter__(self) -> FaultProxy:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.faults.proxy_process", str(theirs.fileno())]
        command += [self._server[0], str(self._server[1])]
        with theirs:
            self._process = subprocess.Popen(
                command,
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        found: Counts = self._call("counts")
        return found

    def requests(self) -> list[LoggedRequest]:
        found: list[LoggedRequest] = self._call("requests")
        return found

    def reset(self) -> None:
        self._call("reset")
