"""The process of a fault proxy: ``python -m tests.faults.proxying.process CONTROL_FD HOST PORT``.

The test controls it through an inherited socket, and the process ends when that closes. It keeps asyncio's own loop:
the timers of uvloop have a resolution of a millisecond, in which a fast connection carries more than a small body.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Control

from tests.faults.proxying.connection import Connection
from tests.faults.proxying.script import Counts, LoggedRequest, Script
from tests.faults.proxying.streams import BUFFER_BYTES, find_header
from tests.faults.proxying.timing import FineSelector, Pace, sleep_until

LOG_LENGTH = 100_000
HOST = "127.0.0.1"


@dataclass(slots=True)
class Records:
    """What has passed since the start or the last reset."""

    num_requests: int = 0
    num_connections: int = 0
    num_bytes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    turns: deque[RecordedTurn] = field(default_factory=lambda: deque(maxlen=LOG_LENGTH))


@dataclass(slots=True)
class RecordedTurn:
    """One request: what is to happen, and what has happened so far."""

    records: Records
    method: str
    path: str
    range: str | None
    ready_at: float
    fault: str | None
    place: float
    status: int | None = None
    num_bytes: int = 0
    has_fault: bool = False

    def note_status(self, status: int) -> None:
        self.status = status

    def note_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.records.num_bytes += num_bytes

    def note_fault(self) -> None:
        assert self.fault is not None
        self.has_fault = True
        self.records.faults[self.fault] += 1

    def as_logged(self) -> LoggedRequest:
        return LoggedRequest(
            method=self.method,
            path=self.path,
            range=self.range,
            status=self.status,
            num_bytes=self.num_bytes,
            fault=self.fault if self.has_fault else None,
        )


class Proxy:
    """Accept connections, choose the fault of each request, and share the bandwidth.

    Args:
        server: The host and the port of the server.
        script: What to do until :meth:`set_script`.
    """

    def __init__(self, server: tuple[str, int], script: Script) -> None:
        self.server = server
        self.records = Records()
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self.set_script(script)

    def set_script(self, script: Script) -> None:
        """Follow a script from its beginning, also on open connections."""
        self._script = script
        self._matches = re.compile(script.path_pattern).search
        self._faults, self._delays = (random.Random(f"{purpose} {script.seed}") for purpose in ("faults", "delays"))
        self._num_chosen = 0
        self._total_pace = Pace(script.total_bytes_per_s)
        rates = [rate for rate in (script.connection_bytes_per_s, script.total_bytes_per_s) if rate is not None]
        self.piece_bytes = min([BUFFER_BYTES, *(max(4096, int(rate / 100)) for rate in rates)])
        for connection in self._connections:
            connection.use_pace(self.make_pace())

    def make_pace(self) -> Pace:
        return Pace(self._script.connection_bytes_per_s)

    async def carry(self, pace: Pace, num_bytes: int, ready_at: float | None) -> None:
        """Wait until a connection, and all together, have carried the next bytes of a body.

        Args:
            pace: The limit of the connection.
            num_bytes: The number of bytes.
            ready_at: For the first bytes of a body, when they may begin, in seconds of :func:`time.monotonic`.
        """
        is_first, start = ready_at is not None, time.monotonic()
        if ready_at is not None and ready_at > start:
            if self._total_pace.bytes_per_s is not None:
                await self._sleep_until(ready_at, pace)  # Until then, other connections use the link.
            start = max(ready_at, time.monotonic())
        paces = (pace, self._total_pace)
        when = max([each.reserve(num_bytes, start, is_first=is_first) for each in paces])
        if when > start or start == ready_at:
            await self._sleep_until(when, pace)

    async def _sleep_until(self, when: float, pace: Pace) -> None:
        late_s = await sleep_until(when)
        pace.note_late(late_s)
        self._total_pace.note_late(late_s)

    def admit(self, head: bytes) -> RecordedTurn:
        """Log a request and choose its delay and its fault."""
        script = self._script
        method, path, *_ = head[: head.index(b"\r\n")].decode("latin-1").split(" ")
        delay_s = script.latency_s + (script.jitter_s * self._delays.random() if script.jitter_s else 0.0)
        fault, place = self._choose_fault(method, path)
        turn = RecordedTurn(
            records=self.records,
            method=method,
            path=path,
            range=find_header(head, "range"),
            ready_at=time.monotonic() + delay_s,
            fault=fault,
            place=place,
        )
        self.records.num_requests += 1
        self.records.turns.append(turn)
        return turn

    def _choose_fault(self, method: str, path: str) -> tuple[str | None, float]:
        script = self._script
        if not script.faults or method not in script.methods or not self._matches(path):
            return None, 0.0
        number, place = self._faults.random(), self._faults.random()
        if script.max_faults is not None and self._num_chosen >= script.max_faults:
            return None, 0.0
        for kind, probability in sorted(script.faults.items()):
            number -= probability
            if number < 0:
                self._num_chosen += 1
                return kind, place
        return None, 0.0

    async def accept(self, listener: socket.socket) -> None:
        """Serve connections for ever."""
        loop = asyncio.get_running_loop()
        while True:
            client, _ = await loop.sock_accept(listener)
            self.records.num_connections += 1
            connection = Connection(client, self)
            self._connections[connection] = task = loop.create_task(connection.serve())
            task.add_done_callback(partial(self._forget, connection))

    def _forget(self, connection: Connection, task: asyncio.Task[None]) -> None:
        del self._connections[connection]
        if not task.cancelled() and (error := task.exception()):
            raise error

    def obey(self, control: Control) -> None:
        """Do what the test asks, and answer."""
        try:
            command, script = control.recv()
        except EOFError:
            loop = asyncio.get_running_loop()
            loop.remove_reader(control.fileno())
            loop.stop()
            return
        answer: object = None
        if command == "set":
            self.set_script(script)
        elif command == "reset":
            self.records = Records()
        elif command == "counts":
            answer = Counts(
                num_requests=self.records.num_requests,
                num_connections=self.records.num_connections,
                num_bytes=self.records.num_bytes,
                num_faults=dict(self.records.faults),
                cpu_s=time.process_time(),
            )
        elif command == "requests":
            answer = [turn.as_logged() for turn in self.records.turns]
        control.send(answer)


def main(control_fd: int, host: str, port: int) -> None:
    """Serve until the control socket closes."""
    control = Control(control_fd)
    loop = asyncio.SelectorEventLoop(FineSelector())
    asyncio.set_event_loop(loop)
    with contextlib.closing(socket.create_server((HOST, 0), backlog=1024)) as listener:
        listener.setblocking(False)
        proxy = Proxy((host, port), control.recv())
        loop.add_reader(control.fileno(), proxy.obey, control)
        loop.create_task(proxy.accept(listener))
        control.send(listener.getsockname()[1])
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
