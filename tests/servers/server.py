"""Servers for the tests of remote storage: real programs that listen on 127.0.0.1 and end with the test process."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardio.storage import Location, make_direct_access, parse_location

INSTALLED = Path(__file__).parents[2] / ".venv" / "servers"  # tools/servers.sh creates this folder.
HOST = "127.0.0.1"
BUCKET = "shardio"  # Each object store has this bucket or container when a test receives the store.
START_TIMEOUT_S = 60.0
LOG_TAIL_BYTES = 3_000

SUPERVISOR = """
exec 3<&0
"$@" </dev/null & server=$!
(read -r _ <&3; kill -KILL "$server" 2>/dev/null) & reader=$!
wait "$server"; status=$?
kill "$reader" 2>/dev/null
exit "$status"
"""
"""A shell script that runs a server until the script reads a line or the end of its input, even if tests are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server: the URL of its keys, as users write it, and the options that obstore needs for it."""

    url: str
    options: Mapping[str, str]
    host: str = HOST
    port: int

    def behind(self, host: str, port: int) -> Server:
        own, other = f"{self.host}:{self.port}", f"{host}:{port}"
        options = {name: value.replace(own, other) for name, value in self.options.items()}
        return Server(url=self.url.replace(own, other), options=options, host=host, port=port)


def find_free_port() -> int:
    """Return a port on which nothing listens, below the range of ports for outgoing connections."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), k=1_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise OSError(f"found no free port between 10000 and 32000 on {HOST}: end other programs")


@contextlib.contextmanager
def run_server(command: Sequence[str | Path], folder: Path, is_ready: Callable[[], bool]) -> Iterator[None]:
    """Run a program in the foreground until the context ends. Enter the context when the server is ready.

    The output is in ``server.log`` in ``folder``. If the server ends too soon, the error includes the end of the log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("ab") as log:
        shell = ["/bin/sh", "-c", SUPERVISOR, "sh", *map(str, command)]
        supervisor = subprocess.Popen(
            shell, cwd=folder, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    assert supervisor.stdin is not None
    try:
        _wait_until_ready(is_ready, supervisor, folder / "server.log")
        yield
    finally:
        with contextlib.suppress(OSError):  # The server may have ended by itself.
            supervisor.stdin.write(b"\n")  # A fork may keep a copy of the pipe open, so closing it is not enough.
            supervisor.stdin.close()
        try:
            supervisor.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(supervisor.pid, signal.SIGKILL)
            supervisor.wait()


def _wait_until_ready(is_ready: Callable[[], bool], supervisor: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while supervisor.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if is_ready():
                return
        time.sleep(0.02)  # Between two attempts.
    status = supervisor.poll()
    failure = f"is not ready after {START_TIMEOUT_S:.0f} s" if status is None else f"ended with status {status}"
    tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
    raise RuntimeError(f"the server {failure}; the end of {log}:\n{tail}")


def answers(url: str) -> bool:
    return request("GET", url)[0] < 500


def create(method: str, url: str, headers: Mapping[str, str] | None = None) -> None:
    """Create a bucket with one request, which has no body."""
    status, body = request(method, url, headers)
    assert 200 <= status < 300, (method, url, status, body)


def request(method: str, url: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
    host, _, target = url.removeprefix("http://").partition("/")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=10)) as connection:
        connection.request(method, f"/{target}", headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read()


def put_all(folder: Path, target: Location) -> Location:
    """Write all files below a folder to a store, several at a time. Return the location of the copies."""

    def write(path: Path) -> None:
        with (target / path.relative_to(folder).as_posix()).write_whole() as file:
            file.write(path.read_bytes())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, filter(Path.is_file, folder.rglob("*"))))
    return target


def upload(folder: Path, url: str, options: Mapping[str, str] | None = None) -> Location:
    return put_all(folder, parse_location(url, make_direct_access(options)))
