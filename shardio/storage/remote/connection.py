"""Connections to the storage process, and how to tell that it has stopped answering.

It may be suspended, or swapped out, in the middle of an answer. A long answer alone says nothing: a request may take
minutes. But the storage process greets each new connection at once, whatever else it does. So a client that has waited
for some time opens another connection. If it gets no greeting, it kills the storage process, which ends all waits.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shardio.errors import StoreError

SILENCE_S = 5.0
"""How long an answer may make no progress until a client looks whether the storage process still greets, in seconds."""

GREETING_S = 25.0
"""How long to wait for a greeting, in seconds."""

START_S = 60.0
"""How long to wait for the first greeting of a storage process, in seconds. It imports obstore before."""

SOCKET, PROCESS_ID = "socket", "process"
"""The names of the socket in the storage process's folder, and of the file that holds its process ID."""

MAX_SOCKET_PATH = 100
"""The longest path of a socket in bytes that all operating systems accept: they limit it to 103 or more."""

DESCRIPTORS = Path("/proc/self/fd")
"""The folder of a process's descriptors on Linux. They give long paths short names."""

_STEP_S = 0.5
_LENGTH = struct.Struct("!Q")
_log = logging.getLogger("shardio")


class SilentError(ConnectionError):
    """The storage process does not answer."""


class StorageConnection:
    """One end of a connection: it sends and receives values and bytes.

    Args:
        end: The socket.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._when_silent: Callable[[], object] | None = None

    def limit_waits(self, patience_s: float, when_silent: Callable[[], object]) -> None:
        """Call a function when the other end has sent or taken nothing for ``patience_s``.

        Unless it raises, the wait goes on.
        """
        self._when_silent = when_silent
        self._end.settimeout(patience_s)

    def fileno(self) -> int:
        """Return the socket's descriptor; -1 if it is closed."""
        return self._end.fileno()

    def send(self, value: object) -> None:
        """Send a value that can be pickled."""
        self.send_bytes(pickle.dumps(value, protocol=5))

    def send_bytes(self, content: bytes | memoryview) -> None:
        """Send bytes."""
        for part in (memoryview(_LENGTH.pack(len(content))), memoryview(content)):
            while part:
                part = part[self._use(self._end.send, part) :]

    def receive(self) -> Any:
        """Return the next value.

        Raises:
            EOFError: If the other end is closed.
        """
        return pickle.loads(self.receive_bytes())  # Both ends belong to this user.

    def receive_bytes(self) -> bytearray:
        """Return the next bytes. Errors are as above."""
        content = bytearray(self._receive_length())
        self._receive_into(memoryview(content))
        return content

    def receive_bytes_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes, which are as many. Errors are as above."""
        length = self._receive_length()
        assert length == len(buffer), f"expected {len(buffer)} bytes, got {length}"
        self._receive_into(buffer)

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _receive_length(self) -> int:
        head = bytearray(_LENGTH.size)
        self._receive_into(memoryview(head))
        (length,) = _LENGTH.unpack(head)
        return int(length)

    def _receive_into(self, buffer: memoryview) -> None:
        while buffer:
            if not (num_bytes := self._use(self._end.recv_into, buffer)):
                raise EOFError("the other process has closed the connection")
            buffer = buffer[num_bytes:]

    def _use(self, transfer: Callable[[memoryview], int], content: memoryview) -> int:
        """Send or receive some bytes. Return their number."""
        while True:
            with suppress(TimeoutError):
                return transfer(content)
            if self._when_silent is not None:
                self._when_silent()


def greet(connection: StorageConnection) -> None:
    """Greet a client that has just connected."""
    connection.send(os.getpid())


def connect_to(folder: Path, patience_s: float | None = None) -> StorageConnection:
    """Connect to the storage process of a folder.

    Args:
        folder: The folder.
        patience_s: How long to wait for a greeting, in seconds; by default, ``GREETING_S``.

    Raises:
        FileNotFoundError, ConnectionRefusedError: If there is none.
        SilentError: If it does not answer. It was killed.
    """
    return _connect(folder, GREETING_S if patience_s is None else patience_s)[0]


def _connect(folder: Path, patience_s: float) -> tuple[StorageConnection, int]:
    """Return a connection to the storage process of a folder, and its process ID."""
    patience = _Patience(folder, patience_s)
    try:
        connection = StorageConnection(connect_socket(folder))
    except BlockingIOError:
        patience.end()
    try:
        connection.limit_waits(_STEP_S, patience.note_step)
        process_id = connection.receive()
        connection.limit_waits(SILENCE_S, partial(_check_answers, folder, process_id))
    except BaseException:  # Ctrl-C must not leave the socket open either.
        connection.close()
        raise
    return connection, process_id


def connect_socket(folder: Path) -> socket.socket:
    """Return a socket that is connected to that of a folder. It was not greeted yet.

    Raises:
        FileNotFoundError, ConnectionRefusedError: If no process listens there.
        BlockingIOError: If too many other clients wait to be greeted.
    """
    end = socket.socket(socket.AF_UNIX)
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GREETING_S), 0))
        with name_socket(folder) as name:
            end.connect(name)
    except BaseException:  # Ctrl-C must not leave the socket open either.
        end.close()
        raise
    return end


@contextmanager
def name_socket(folder: Path) -> Iterator[str]:
    """Give the block a path of the socket in a folder. The folder's own path may be too long for sockets.

    Raises:
        StoreError: If there is no shorter path.
    """
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        yield path
        return
    if not DESCRIPTORS.is_dir():
        raise StoreError(f"the path {path} is too long for a socket: set TMPDIR to a shorter one")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"{DESCRIPTORS}/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


class _Patience:
    """How long a client still waits for the greeting of the storage process of a folder.

    It counts steps, so that the time while the client itself is suspended does not count.
    """

    def __init__(self, folder: Path, patience_s: float) -> None:
        self._folder, self._process_id = folder, read_process_id(folder)
        self._patience_s, self._num_left = patience_s, int(patience_s / _STEP_S)

    def note_step(self) -> None:
        """Note that the greeting has not come for a further step."""
        self._num_left -= 1
        if self._num_left <= 0:
            self.end()

    def end(self) -> NoReturn:
        """Kill the storage process, unless another client has replaced it in the meantime, and raise a SilentError."""
        if self._process_id is not None and self._process_id == read_process_id(self._folder):
            with suppress(FileNotFoundError, ProcessLookupError):  # Another client does the same at this moment.
                (self._folder / PROCESS_ID).unlink()
                os.kill(self._process_id, signal.SIGKILL)
                _log.warning(
                    "shardio's storage process (process %d) has not answered for %g s, perhaps because it is suspended "
                    "or swapped out: it was killed, a new one starts, and its requests are repeated",
                    self._process_id,
                    self._patience_s,
                )
        raise SilentError(f"the storage process of {self._folder} does not answer")


def _check_answers(folder: Path, process_id: int) -> None:
    """Raise a SilentError if the storage process with an ID does not greet new connections any more."""
    with suppress(FileNotFoundError, ConnectionRefusedError):  # It has ended, which ends the wait by itself.
        connection, found = _connect(folder, GREETING_S)
        connection.close()
        if found != process_id:
            raise SilentError(f"the storage process of {folder} was replaced")


def write_process_id(folder: Path, process_id: int) -> None:
    """Record the process ID of a folder's storage process."""
    (folder / PROCESS_ID).write_text(str(process_id))


def read_process_id(folder: Path) -> int | None:
    """Return the process ID of the storage process of a folder; None if it is not known yet."""
    try:
        return int((folder / PROCESS_ID).read_text())
    except (FileNotFoundError, ValueError):  # Another process may be writing it.
        return None
