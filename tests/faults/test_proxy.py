"""The fault proxy obeys its limits, produces the faults in its script, and passes on everything else unchanged."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.proxy import KINDS, OWN_ANSWERS, FaultProxy, Script
from tests.raising import assert_raises
from tests.servers.server import run_server
from tests.servers.web_folder import WebFolder, serve_folder

pytestmark = pytest.mark.slow

CONTENT = random.Random(0).randbytes(100_000)
RANGE = {"Range": "bytes=1000-75999"}
PART = CONTENT[1_000:76_000]

Answer = tuple[int, dict[str, str], bytes]


class Handler(WebFolder):
    def answer_file(self, content: bytes) -> None:
        if self.command == "HEAD" or not self.path.startswith("/chunked"):
            return super().answer_file(content)
        self.answer_head(200, ("Transfer-Encoding", "chunked"))
        for part in (content[start : start + 1_000] for start in range(0, len(content), 1_000)):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")
        return None

    def do_PUT(self) -> None:  # noqa: N802  # http.server calls it by this name.
        length = self.headers.get("Content-Length")
        content = b"" if length is None else self.rfile.read(int(length))
        if length is None:
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        (self.root / self.path[1:]).write_bytes(content)
        self.answer(200, b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for name, content in {"object": CONTENT, "chunked": CONTENT, "empty": b"", "one": b"1"}.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def proxy(folder: Path) -> Iterator[FaultProxy]:
    with serve_folder(folder, Handler) as (url, _), FaultProxy("127.0.0.1", int(url.rpartition(":")[2])) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def _reset(proxy: FaultProxy) -> None:
    proxy.set(Script())
    proxy.reset()


def connect(port: int) -> contextlib.closing[http.client.HTTPConnection]:
    return contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60))


def ask(connection: http.client.HTTPConnection, method: str = "GET", path: str = "/object", **options: Any) -> Answer:
    connection.request(method, path, **options)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def ask_for_part(proxy: FaultProxy) -> Answer:
    with connect(proxy.port) as connection:
        return ask(connection, headers=RANGE)


def test_requests_and_answers_pass_unchanged_and_are_counted(folder: Path, proxy: FaultProxy) -> None:
    content = random.Random(1).randbytes(3_000_000)
    with connect(proxy.port) as connection:
        for path, expected in [("/object", CONTENT), ("/chunked", CONTENT), ("/empty", b""), ("/one?a=b%20c", b"1")]:
            assert ask(connection, path=path)[2] == expected
            assert ask(connection, "HEAD", path)[2] == b""
        assert ask(connection, path="/missing")[0] == 404
        status, headers, body = ask(connection, headers=RANGE)
        assert (status, headers["Content-Range"], body) == (206, "bytes 1000-75999/100000", PART)
        bodies: list[dict[str, Any]] = [
            {"body": content},
            {"body": iter([content, b"end"]), "encode_chunked": True},
            {"body": content, "headers": {"Expect": "100-continue"}},
        ]
        for number, options in enumerate(bodies):
            assert ask(connection, "PUT", f"/put-{number}", **options)[0] == 200
    assert [(folder / f"put-{i}").read_bytes() for i in range(3)] == [content, content + b"end", content]
    assert proxy.counts().num_requests == len(proxy.requests()) == 13
    found = proxy.requests()[9]
    assert (found.method, found.path, found.range, found.status) == ("GET", "/object", RANGE["Range"], 206)
    assert (found.num_bytes, found.fault) == (len(PART), None)


def test_bandwidth_and_latency_are_limited(proxy: FaultProxy) -> None:
    for script, least_s in ((Script(latency_s=0.05), 0.05), (Script(connection_bytes_per_s=1e6), 0.07)):
        proxy.set(script)
        start = time.monotonic()
        assert [ask_for_part(proxy)[2] for _ in range(2)] == [PART] * 2
        assert time.monotonic() - start >= 2 * least_s


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        *((kind, ConnectionResetError) for kind in ("reset_before", "reset_in_body")),
        *((kind, TimeoutError) for kind in ("stall_before", "stall_in_body")),
        ("truncated", None),
    ],
)
def test_faults_that_end_or_stall_connections(proxy: FaultProxy, kind: str, ending: type[OSError] | None) -> None:
    proxy.set(Script(faults={kind: 1.0}, seed=3))
    answer, error = b"", None
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=0.3) as connection:
        connection.sendall(b"GET /object HTTP/1.1\r\nRange: bytes=1000-75999\r\n\r\n")
        try:
            while received := connection.recv(1 << 20):
                answer += received
        except OSError as found:
            error = type(found)
    body = answer.partition(b"\r\n\r\n")[2]
    assert error is ending
    assert PART.startswith(body)
    assert len(body) < len(PART)
    assert body or kind not in ("truncated", "stall_in_body")


def test_faults_that_keep_connections_open(proxy: FaultProxy) -> None:
    def ask_with(kind: str, seed: int = 0) -> Answer:
        proxy.set(Script(faults={kind: 1.0}, max_faults=1, seed=seed))
        return ask(connection, headers=RANGE)

    with connect(proxy.port) as connection:
        status, headers, body = ask_with("wrong_length")
        assert (status, headers["Content-Range"]) == (206, "bytes 1000-75999/100000")
        assert int(headers["Content-Length"]) == len(body) < len(PART)
        assert PART.startswith(body)
        status, headers, body = ask_with("too_long")
        assert (status, body, headers.get("Content-Range")) == (200, CONTENT, None)
        for seed in range(4):
            status, headers, body = ask_with("wrong_range", seed)
            first = int(headers["Content-Range"].removeprefix("bytes ").partition("-")[0])
            assert (status, body) == (206, CONTENT[first : first + len(PART)])
            assert first != 1_000
        difference = int.from_bytes(ask_with("corrupt")[2], "big") ^ int.from_bytes(PART, "big")
        assert difference.bit_count() == 1
        for kind in OWN_ANSWERS:
            status, headers, body = ask_with(kind)
            assert status == {"expired_token": 403, "changed_object": 412}.get(kind) or int(kind[-3:])
            assert body.startswith(b"<?xml")
            assert headers.get("Retry-After") == ("1" if kind == "status_429" else None)
        proxy.set(Script(faults={"corrupt": 1.0}))
        for path, content in (("/empty", b""), ("/one", b"1")):
            assert ask(connection, path=path)[2] == content  # Bodies of 0 and 1 bytes are too short for faults.
        assert len(ask(connection, path="/chunked")[2]) == len(CONTENT)


def test_the_seed_and_the_order_of_requests_determine_the_faults(proxy: FaultProxy) -> None:
    def faults_of(seed: int) -> list[str | None]:
        proxy.set(Script(seed=seed, faults=dict.fromkeys([kind for kind in KINDS if "stall" not in kind], 0.07)))
        proxy.reset()
        for _ in range(60):
            with contextlib.suppress(OSError, http.client.HTTPException):
                ask_for_part(proxy)
        return [logged.fault for logged in proxy.requests()]

    first = faults_of(1)
    assert len(set(first)) > 6
    assert faults_of(1) == first != faults_of(2)
    proxy.set(Script(faults={"status_500": 1.0}, max_faults=2))
    with connect(proxy.port) as connection:
        assert [ask(connection, method)[0] for method in ("HEAD", "GET", "GET", "GET")] == [200, 500, 500, 200]


RUN_PROXY = """
import sys
from tests.faults.proxy import FaultProxy
with FaultProxy("127.0.0.1", 9) as proxy:
    print(proxy.port, flush=True)
    sys.stdin.read()
"""

RUN_SERVER = """
import sys
from pathlib import Path
from tests.servers.server import answers, find_free_port, run_server
port, folder = find_free_port(), Path(sys.argv[1])
command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
with run_server(command, folder, lambda: answers(f"http://127.0.0.1:{port}/")):
    print(port, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("program", "end", "status"),
    [(RUN_PROXY, signal.SIGKILL, 502), (RUN_SERVER, signal.SIGKILL, 200), (RUN_SERVER, signal.SIGINT, 200)],
)
def test_proxy_and_servers_end_with_the_tests(tmp_path: Path, program: str, end: signal.Signals, status: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], env=environment, **pipes) as tests:
        assert tests.stdout is not None
        port = int(tests.stdout.readline())
        with connect(port) as connection:
            assert ask(connection, path="/")[0] == status
        tests.send_signal(end)
    is_listened_to = True
    while is_listened_to:
        with socket.socket() as probe:
            is_listened_to = probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    server = run_server([sys.executable, "-c", "raise SystemExit('the disk is full')"], tmp_path, lambda: False)
    assert_raises(RuntimeError, r"ended with status 1(.|\n)*the disk is full", server.__enter__)
