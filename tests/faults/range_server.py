"""A small HTTP server whose every answer is known, for the tests of the fault proxy."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Headers = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeServer:
    """A running server, and what it has received.

    Args:
        host: Its address.
        port: Its port.
        objects: What it serves, by path. A PUT adds to it.
        received: The request line and the headers of each request.
        connections: The address of the other side of each connection.
    """

    host: str
    port: int
    objects: dict[str, bytes]
    received: list[tuple[str, Headers]] = field(default_factory=list)
    connections: list[tuple[str, int]] = field(default_factory=list)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: RangeServer

    def setup(self) -> None:
        super().setup()
        self.state.connections.append(self.client_address)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return "Thu, 01 Jan 1970 00:00:00 GMT"  # The same answer at any time.

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass

    def parse_request(self) -> bool:
        is_good = super().parse_request()
        if is_good:
            self.state.received.append((self.requestline, list(self.headers.items())))
        return is_good

    def do_GET(self) -> None:  # http.server calls it by this name
        content = self.state.objects.get(self.path)
        if content is None:
            self.answer(404, b"nothing")
        elif self.path.startswith("/chunked"):
            self.answer_in_chunks(content)
        elif self.path.startswith("/until-close"):
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)
        elif asked := self.headers.get("Range"):
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            part = content[first : last + 1]
            self.answer(206, part, f"bytes {first}-{first + len(part) - 1}/{len(content)}")
        else:
            self.answer(200, content)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            content = self.rfile.read(int(self.headers["Content-Length"]))
        self.state.objects[self.path] = content
        self.answer(200, b"")

    def do_DELETE(self) -> None:
        self.state.objects.pop(self.path, None)
        self.send_response(204)
        self.end_headers()

    def answer(self, status: int, body: bytes, content_range: str | None = None) -> None:
        self.send_response(status)
        if content_range is not None:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_in_chunks(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(content), 1_000):
            part = content[start : start + 1_000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # Faults reset connections.
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextlib.contextmanager
def run_range_server(objects: dict[str, bytes]) -> Iterator[RangeServer]:
    """Serve objects until the context ends."""
    handler = type("Handler", (_Handler,), {})
    with _Server(("127.0.0.1", 0), handler) as server:
        host, port = server.server_address[:2]
        handler.state = RangeServer(host=str(host), port=port, objects=objects)  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield handler.state  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()
