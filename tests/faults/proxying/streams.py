"""The little of HTTP/1.1 that a proxy needs: heads, and where bodies end (RFC 9112)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache

BUFFER_BYTES = 256 << 10
END_OF_HEAD = b"\r\n\r\n"
END_OF_LINE = b"\r\n"

Bytes = bytes | bytearray | memoryview

Pieces = AsyncIterator[tuple[Bytes, Bytes]]
"""The pieces of a body: what to pass on, and what of it is content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """Where a body ends: after ``length`` bytes, after the last chunk, or if neither is given with the connection."""

    length: int | None = None
    chunked: bool = False

    @property
    def until_close(self) -> bool:
        return self.length is None and not self.chunked


class Stream:
    """A connection with a buffer of what has been received.

    Args:
        connection: A connected socket that does not block.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # What is in the buffer and has not been taken.
        self._waiter: asyncio.Future[int] | None = None
        self._is_watched = False
        """Whether the loop calls :meth:`_on_readable`. It goes on to do so while requests follow one another."""

    async def _receive(self) -> int:
        """Receive into the free end of the buffer; return the number of bytes, 0 at the end of the connection."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == BUFFER_BYTES:
            if self._start == 0:
                raise ConnectionError(f"a head or a line of more than {BUFFER_BYTES} bytes")
            rest = bytes(self._view[self._start : self._end])
            self._view[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        received = None if self._is_watched else self._try_to_receive()
        if received is None:
            self._waiter = self._loop.create_future()
            if not self._is_watched:
                self._loop.add_reader(self._socket, self._on_readable)
                self._is_watched = True
            received = await self._waiter
        self._end += received
        return received

    def _try_to_receive(self) -> int | None:
        try:
            return self._socket.recv_into(self._view[self._end :])
        except BlockingIOError:
            return None

    def _on_readable(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            self._unwatch()  # Nothing has room for what came.
            return
        try:
            received = self._try_to_receive()
        except OSError as error:
            waiter.set_exception(error)
            return
        if received is None:
            self._waiter = waiter
        else:
            waiter.set_result(received)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._loop.remove_reader(self._socket)
            self._is_watched = False

    async def read_until(self, delimiter: bytes) -> bytes:
        """Return everything up to and including a delimiter, or nothing if the connection has ended before."""
        while (found := self._buffer.find(delimiter, self._start, self._end)) < 0:
            if not await self._receive():
                if self._start == self._end:
                    return b""
                raise EOFError("the connection ended within a head or a line")
        found += len(delimiter)
        text = bytes(self._view[self._start : found])
        self._start = found
        return text

    def read_body(self, framing: Framing, piece_bytes: int) -> Pieces:
        """Yield pieces as they come: what to pass on, and what of it is content. They are valid until the next one."""
        if framing.length is not None:
            return self._read(framing.length, piece_bytes)
        return self._read_chunked(piece_bytes) if framing.chunked else self._read_all(piece_bytes)

    async def _read(self, num_bytes: int, piece_bytes: int) -> Pieces:
        while num_bytes:
            if self._start == self._end and not await self._receive():
                raise EOFError(f"the connection ended {num_bytes} bytes before the end of the body")
            piece = self._take(min(num_bytes, piece_bytes))
            num_bytes -= len(piece)
            yield piece, piece

    async def _read_all(self, piece_bytes: int) -> Pieces:
        while self._start < self._end or await self._receive():
            piece = self._take(piece_bytes)
            yield piece, piece

    async def _read_chunked(self, piece_bytes: int) -> Pieces:
        while True:
            line = await self._read_line()
            yield line, b""
            num_bytes = int(line.split(b";")[0], 16)
            if num_bytes == 0:
                break
            async for pair in self._read(num_bytes, piece_bytes):
                yield pair
            yield await self._read_line(), b""
        while line != END_OF_LINE:  # The trailer.
            line = await self._read_line()
            yield line, b""

    async def _read_line(self) -> bytes:
        line = await self.read_until(END_OF_LINE)
        if not line:
            raise EOFError("the connection ended within a chunked body")
        return line

    def _take(self, max_bytes: int) -> memoryview:
        end = min(self._end, self._start + max_bytes)
        piece = self._view[self._start : end]
        self._start = end
        return piece

    async def send(self, *parts: Bytes) -> None:
        """Send parts one after the other, without joining them in memory."""
        try:
            sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        for part in parts:
            if sent < len(part):
                await self._loop.sock_sendall(self._socket, memoryview(part)[sent:])
            sent = max(sent - len(part), 0)

    def has_ended(self) -> bool:
        """Return whether the other side has closed the connection, or sent what nothing asked for."""
        if self._is_watched:
            return False  # Otherwise, it would not be watched any more.
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    async def wait_until_closed(self) -> None:
        """Wait until the other side closes the connection; ignore what it sends."""
        self._start = self._end = 0
        with contextlib.suppress(OSError):
            while await self._receive():
                self._start = self._end = 0

    def reset(self) -> None:
        """End the connection by a TCP reset, which drops what has not been delivered."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._unwatch()
        self._socket.close()


@cache
def _header(name: str) -> re.Pattern[bytes]:
    return re.compile(rb"\r\n" + name.encode() + rb":[ \t]*([^\r\n]*?)[ \t]*(?=\r\n)", re.IGNORECASE)


def find_header(head: bytes, name: str) -> str | None:
    """Return the value of a header, or None."""
    found = _header(name).search(head)
    return found[1].decode("latin-1") if found else None


def set_header(head: bytes, name: str, value: str | None) -> bytes:
    """Return a head with another value of a header, or without it."""
    rest = _header(name).sub(b"", head)
    if value is None:
        return rest
    return rest[:-2] + f"{name}: {value}\r\n\r\n".encode("latin-1")


def find_framing(head: bytes) -> Framing | None:
    """Return the framing that headers give, or None if they give none."""
    if (length := find_header(head, "content-length")) is not None:
        return Framing(length=int(length))
    return Framing(chunked=True) if "chunked" in (find_header(head, "transfer-encoding") or "").lower() else None


def wants_close(head: bytes) -> bool:
    """Return whether the sender of a head closes the connection after the body."""
    option = (find_header(head, "connection") or "").lower()
    first_line = head[: head.index(END_OF_LINE)]
    return "close" in option or (b"HTTP/1.0" in first_line and "keep-alive" not in option)
