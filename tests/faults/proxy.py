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
from multiprocessing.connection import Connection as Control
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.proxying.script import KINDS, Counts, LoggedRequest, Script

__all__ = ["KINDS", "Counts", "FaultProxy", "LoggedRequest", "Script"]

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 10.0


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
        command = [sys.executable, "-m", "tests.faults.proxying.process", str(theirs.fileno())]
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
        """Follow another script from its beginning."""
        self._call("set", script)

    def counts(self) -> Counts:
        """Return what has passed since the start or the last reset."""
        found: Counts = self._call("counts")
        return found

    def requests(self) -> list[LoggedRequest]:
        """Return the requests since then, at most the last 100,000, in the order in which they came."""
        found: list[LoggedRequest] = self._call("requests")
        return found

    def reset(self) -> None:
        """Clear the counts and the log. The script continues."""
        self._call("reset")
