"""nginx: serves a folder over HTTP, with ranges, ETags and connections that stay open."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.servers.server import HOST, Server, answers, find_free_port, run_server

CONFIGURATION = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/bodies;
    proxy_temp_path {folder}/proxied;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    default_type application/octet-stream;
    sendfile on;
    keepalive_requests 1000000;
    server {{
        listen {host}:{port} backlog=1024;
        root {files};
    }}
}}
"""


def find_program() -> str | None:
    """Return the path of nginx. Systems install it where only root's searches look."""
    return shutil.which("nginx", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


def is_installed() -> bool:
    return find_program() is not None


@contextlib.contextmanager
def run_nginx(folder: Path, files: Path) -> Iterator[Server]:
    """Run nginx.

    Args:
        folder: Where its log and its temporary files are.
        files: The folder that it serves. The caller writes into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = find_free_port()
    url = f"http://{HOST}:{port}"
    configuration = folder / "nginx.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder, files=files, host=HOST, port=port))
    command: list[str | Path] = [find_program() or "nginx", "-e", "stderr", "-p", folder, "-c", configuration]
    with run_server(command, folder, lambda: answers(url)):
        yield Server(url=url, options={"allow_http": "true"}, port=port)
