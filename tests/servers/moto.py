"""moto: an emulation of S3 that has more of its interface than other stores. It accepts any signature."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.servers.server import BUCKET, HOST, INSTALLED, Server, answers, create, find_free_port, run_server

PYTHON = INSTALLED / "bin" / "python"


def is_installed() -> bool:
    return (INSTALLED / "bin" / "moto_server").exists()


@contextlib.contextmanager
def run_moto(folder: Path) -> Iterator[Server]:
    """Run moto, which keeps its data in memory, with its log in a folder."""
    port = find_free_port()
    url = f"http://{HOST}:{port}"
    options = {
        "endpoint": url,
        "access_key_id": "any",
        "secret_access_key": "any",
        "region": "us-east-1",
        "virtual_hosted_style_request": "false",
        "allow_http": "true",
    }
    command: list[str | Path] = [PYTHON, "-I", "-m", "moto.server", "-H", HOST, "-p", str(port)]
    with run_server(command, folder, lambda: answers(f"{url}/moto-api/")):
        create("PUT", f"{url}/{BUCKET}")
        yield Server(url=f"s3://{BUCKET}", options=options, port=port)
