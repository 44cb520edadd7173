"""Serve a folder from a thread of the test. Subclasses of :class:`WebFolder` answer as unusual servers do."""

from __future__ import annotations

import atexit
import contextlib
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest


class WebFolder(BaseHTTPRequestHandler):
    """A handler for HEAD, GET and range requests. Each server has its own subclass, which records requests."""

    protocol_version = "HTTP/1.1"
    root: Path
    requests: list[tuple[str, str]]

    def do_GET(self) -> None:  # http.server requires this name.
        path = unquote(urlsplit(self.path).path)
        self.requests.append((self.command, path))
        self.answer_path(path)

    do_HEAD = do_GET  # noqa: N815

    def answer_path(self, path: str) -> None:
        file = self.root / path.lstrip("/")
        if file.is_file():
            self.answer_file(file.read_bytes())
        else:
            self.answer(404, b"not here")

    def answer_file(self, content: bytes) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None:
            return self.answer(200, content, *self.describe(content))
        first, last = int(found[1]), min(int(found[2]), len(content) - 1)
        self.answer_range(content, first, last)
        return None

    def answer_range(self, content: bytes, first: int, last: int) -> None:
        place = f"bytes {first}-{last}/{len(content)}"
        self.answer(206, content[first : last + 1], ("Content-Range", place), *self.describe(content))

    def describe(self, content: bytes) -> list[tuple[str, str]]:
        return [("ETag", f'"{hash(content):x}"')]

    def answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        """Answer with a body, or, for a HEAD request, with only its length."""
        self.answer_head(status, ("Content-Length", str(len(body))), *headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_head(self, status: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for header in headers:
            self.send_header(*header)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # The client closes connections early.
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@cache
def _make_certificate() -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = Path(tempfile.mkdtemp(prefix="shardio-certificate-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    files: list[str | Path] = ["-out", certificate, "-keyout", key]
    subprocess.run(["openssl", "req", "-x509", *kind, *name, *files], check=True, capture_output=True)
    return certificate, key


@contextlib.contextmanager
def serve_folder(
    root: Path, kind: type[WebFolder] = WebFolder, *, tls: bool = False
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Serve a folder until the context ends. Yield the URL and a list of the requests so far."""
    requests = list[tuple[str, str]]()
    with _Server(("127.0.0.1", 0), type("Handler", (kind,), {"root": root, "requests": requests})) as server:
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*_make_certificate())
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()
