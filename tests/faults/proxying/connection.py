"""One client's connection to a fault proxy, and the proxy's connection to the server for it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Protocol

from tests.faults.proxying.answers import ask_other_range, error_answer
from tests.faults.proxying.script import IN_BODY, OTHER_RANGES, OWN_ANSWERS
from tests.faults.proxying.streams import (
    END_OF_HEAD,
    Bytes,
    Framing,
    Pieces,
    Stream,
    find_framing,
    find_header,
    set_header,
    wants_close,
)
from tests.faults.proxying.timing import Pace, sleep_until

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
EMPTY = Framing(length=0)


class Turn(Protocol):
    """One request, as the proxy that owns the connection logs it and decides on it."""

    ready_at: float
    """The earliest time of the response's first byte, in seconds of :func:`time.monotonic`."""
    fault: str | None
    """The fault that happens if the response allows it."""
    place: float
    """A random number in [0, 1), which says where in the body."""

    def note_status(self, status: int) -> None: ...
    def note_bytes(self, num_bytes: int) -> None: ...
    def note_fault(self) -> None: ...


class Owner(Protocol):
    """The proxy, as its connections see it."""

    server: tuple[str, int]

    def admit(self, head: bytes) -> Turn: ...
    def make_pace(self) -> Pace: ...
    async def carry(self, pace: Pace, num_bytes: int, ready_at: float | None) -> None: ...
    @property
    def piece_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The head of a server's response, its status, and where its body ends."""

    head: bytes
    status: int
    framing: Framing


class Connection:
    """Pass one client's requests to the server, one after the other, with the faults that the proxy chooses."""

    def __init__(self, client: socket.socket, owner: Owner) -> None:
        self._client = Stream(client)
        self._server: Stream | None = None
        self._owner = owner
        self._pace = owner.make_pace()

    async def serve(self) -> None:
        """Serve until either side, or a fault, ends the connection."""
        try:
            with contextlib.suppress(OSError, EOFError):
                while head := await self._client.read_until(END_OF_HEAD):
                    if not await self._answer(head, self._owner.admit(head)) or wants_close(head):
                        break
        finally:
            self._client.close()
            self._leave_server()

    def use_pace(self, pace: Pace) -> None:
        """Change the limit of bandwidth."""
        self._pace = pace

    async def _answer(self, head: bytes, turn: Turn) -> bool:
        """Answer one request. Return whether the client may send another one."""
        if turn.fault in OWN_ANSWERS:
            turn.note_fault()
            return await self._answer_error(head, turn, turn.fault)
        if turn.fault == "stall_before":
            turn.note_fault()
            await self._client.wait_until_closed()
            return False
        if turn.fault in OTHER_RANGES and (response := await self._ask_other(head, turn)):
            turn.note_fault()
            return await self._pass_on(response, turn)
        try:
            response = await self._ask(head)
        except ConnectionRefusedError:
            return await self._answer_error(head, turn, "no_server")
        if turn.fault == "reset_before":
            turn.note_fault()
            await sleep_until(turn.ready_at)
            self._client.reset()
            return False
        if turn.fault in IN_BODY:
            return await self._spoil(response, turn)
        return await self._pass_on(response, turn)

    async def _answer_error(self, head: bytes, turn: Turn, kind: str) -> bool:
        """Answer with an error of the proxy's own, after the whole request."""
        async for _ in self._read_request(head):
            pass
        await sleep_until(turn.ready_at)
        status, answer, body = error_answer(kind)
        turn.note_status(status)
        content = b"" if head.startswith(b"HEAD ") else body
        await self._client.send(answer, content)
        turn.note_bytes(len(content))
        return True

    async def _read_request(self, head: bytes) -> AsyncIterator[Bytes]:
        """Yield the body of a request as it is on the wire."""
        if find_header(head, "expect"):
            await self._client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for raw, content in self._client.read_body(find_framing(head) or EMPTY, self._owner.piece_bytes):
            await self._owner.carry(self._pace, len(content), None)
            yield raw

    async def _ask(self, head: bytes) -> Response:
        """Send a request with its body to the server; return the response's head."""
        if self._server is None or self._server.has_ended():
            self._leave_server()
            connection = socket.socket()
            connection.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(connection, self._owner.server)
            except OSError:
                connection.close()
                raise
            self._server = Stream(connection)
        await self._server.send(head)
        if not head.startswith(b"GET "):
            async for raw in self._read_request(head):
                await self._server.send(raw)
        while True:
            answer = await self._server.read_until(END_OF_HEAD)
            found = STATUS.match(answer)
            if found is None:
                raise EOFError("the server ended the connection without a response")
            status = int(found[1])
            if status >= 200:  # The others are interim.
                break
        has_body = not head.startswith(b"HEAD ") and status not in (204, 304)
        return Response(head=answer, status=status, framing=(find_framing(answer) or Framing()) if has_body else EMPTY)

    async def _ask_other(self, head: bytes, turn: Turn) -> Response | None:
        """Ask for another range of the object, which invalidates signatures. Return None if the server refuses."""
        other = ask_other_range(head, turn.fault or "", turn.place)
        if other is None:
            return None
        changed, status, length = other
        for request in (changed, set_header(changed, "Authorization", None)):
            response = await self._ask(request)
            found = response.framing.length
            if response.status == status and found is not None and length in (None, found):
                return response
            self._leave_server()
        return None

    async def _pass_on(self, response: Response, turn: Turn, pieces: Pieces | None = None) -> bool:
        """Send a response to the client as it is. Its body comes from the server unless it is given."""
        turn.note_status(response.status)
        head = response.head
        async for raw, content in pieces or self._read_response(response):
            await self._owner.carry(self._pace, len(content), turn.ready_at if head else None)
            await self._client.send(head, raw)
            turn.note_bytes(len(content))
            head = b""
        if head:
            await sleep_until(turn.ready_at)
            await self._client.send(head)
        if wants_close(response.head) or response.framing.until_close:
            self._leave_server()
            return False
        return True

    async def _spoil(self, response: Response, turn: Turn) -> bool:
        """Send a response whose body has a fault, if the body is long enough for it."""
        response, pieces = await self._with_length(response)
        num_bytes = response.framing.length or 0
        if num_bytes < 2:
            return await self._pass_on(response, turn, pieces)
        turn.note_fault()
        turn.note_status(response.status)
        head_of_server = head = response.head
        end = 1 + int(turn.place * (num_bytes - 1))
        flipped = -1
        if turn.fault == "corrupt":
            flipped, end = end - 1, num_bytes
        elif turn.fault == "wrong_length":
            head = set_header(head, "Content-Length", str(end))
        sent = 0
        async for _, content in pieces:
            piece = bytearray(content[: end - sent])
            if 0 <= flipped - sent < len(piece):
                piece[flipped - sent] ^= 1 << flipped % 8
            await self._owner.carry(self._pace, len(piece), turn.ready_at if head else None)
            await self._client.send(head, piece)
            turn.note_bytes(len(piece))
            head, sent = b"", sent + len(piece)
            if sent == end:
                break
        return await self._end_spoiled(turn.fault) and not wants_close(head_of_server)

    def _read_response(self, response: Response) -> Pieces:
        assert self._server is not None
        return self._server.read_body(response.framing, self._owner.piece_bytes)

    async def _with_length(self, response: Response) -> tuple[Response, Pieces]:
        """Return a response whose length is known, and its body. Only a body without a length is read whole."""
        pieces = self._read_response(response)
        if response.framing.length is not None:
            return response, pieces
        body = b"".join([bytes(content) async for _, content in pieces])
        head = set_header(response.head, "Transfer-Encoding", None)
        head = set_header(head, "Content-Length", str(len(body)))
        return replace(response, head=head, framing=Framing(length=len(body))), _yield_whole(body)

    async def _end_spoiled(self, fault: str | None) -> bool:
        """End a response with a fault as its kind demands. Return whether the client may send another request."""
        if fault == "corrupt":
            return True
        self._leave_server()  # The rest of the body is still on the way.
        if fault == "reset_in_body":
            self._client.reset()
        elif fault == "stall_in_body":
            await self._client.wait_until_closed()
        return fault == "wrong_length"

    def _leave_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


async def _yield_whole(body: bytes) -> Pieces:
    yield body, body
