"""The servers end with the process that started them, and errors show why a server does not start."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers.server import HOST, answers, find_free_port, run_server

pytestmark = pytest.mark.slow


def test_a_server_that_does_not_start_shows_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('the disk is full')"]
    with (
        pytest.raises(RuntimeError, match=r"ended with status 1(.|\n)*the disk is full"),
        run_server(command, tmp_path, lambda: answers(f"http://{HOST}:{find_free_port()}/")),
    ):
        pass


RUN_SERVER = """
import sys
from pathlib import Path
from tests.servers.server import answers, run_server
port, folder = sys.argv[1:]
command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", port]
with run_server(command, Path(folder), lambda: answers(f"http://127.0.0.1:{port}/")):
    print("ready", flush=True)
    sys.stdin.read()
"""


def is_listened_to(port: int) -> bool:
    try:
        return answers(f"http://{HOST}:{port}/")
    except ConnectionRefusedError:
        return False
    except (OSError, http.client.HTTPException):
        return True  # The server ended during its response.


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path, end: signal.Signals) -> None:
    port = find_free_port()
    tests = subprocess.Popen(
        [sys.executable, "-c", RUN_SERVER, str(port), tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    with tests:
        assert tests.stdout is not None
        assert tests.stdout.readline() == b"ready\n"
        tests.send_signal(end)
    while is_listened_to(port):
        pass
