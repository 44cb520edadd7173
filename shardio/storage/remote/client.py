"""This process's connections to its storage process."""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from shardio.background import start_process
from shardio.errors import StoreError
from shardio.forks import call_at_fork
from shardio.locks import WorkLock
from shardio.storage.remote.connection import (
    SOCKET,
    START_S,
    StorageConnection,
    connect_socket,
    connect_to,
    name_socket,
    write_process_id,
)
from shardio.storage.remote.messages import Arrived, Done, Page, ReadRanges, Request, RequestFailed, Walk
from shardio.world import find_world_size

Result = TypeVar("Result")
Message = TypeVar("Message")

MAX_DEATHS = 3
"""How often one request may find that the storage process has died, or does not answer."""

END_S = 5.0
"""How long to wait for the end of a storage process that was killed. It may be waiting for a disk."""

START_LOCK = "starting"
"""The name of the lock of the process that replaces a storage process."""

CLOSE_S = 0.5
"""How long to wait for the storage process to end when this process exits. It usually takes 10 ms."""


class Client:
    """This process's connections to the storage process. Threads share it, and forked children go on using it.

    Attributes:
        folder: The folder of the storage process; None before it is first needed.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._lifeline = -1
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._idle: list[StorageConnection] = []
        call_at_fork(self, after_in_child=Client._leave_to_parent)
        self._is_exiting = False
        atexit.register(self._exit)

    def ask(self, request: Request) -> Any:
        """Return what a request returns, or raise its error."""

        def ask(connection: StorageConnection) -> Any:
            connection.send(request)
            return _receive(connection, Done).value

        return self._try(ask)

    def read(self, request: ReadRanges) -> list[bytes]:
        """Return the content of each range."""

        def read(connection: StorageConnection) -> list[bytes]:
            connection.send(request)
            contents = list[bytes]()
            for _ in request.ranges:
                _receive(connection, Arrived)
                contents.append(bytes(connection.receive_bytes()))
            _receive(connection, Done)
            return contents

        return self._try(read)

    def read_into(self, request: ReadRanges, buffer: memoryview) -> None:
        """Fill a buffer with the content of the only range."""

        def read(connection: StorageConnection) -> None:
            connection.send(request)
            _receive(connection, Arrived)
            connection.receive_bytes_into(buffer)
            _receive(connection, Done)

        self._try(read)

    def walk(self, request: Walk) -> Iterator[tuple[str, int, str]]:
        """Yield the key, the size in bytes and the version of each object below a folder."""
        for _ in range(MAX_DEATHS):
            with suppress(EOFError, ConnectionError):
                try:
                    with self._connect() as connection:
                        connection.send(request)
                        while isinstance(page := _receive(connection, (Page, Done)), Page):
                            yield from page.objects
                            if page.objects:
                                request = replace(request, after=page.objects[-1][0])
                        return
                except _AnsweredError as answered:
                    raise answered.error from None
            self._close_idle()
        raise _died(f" while it listed {request.root}/{request.key}")

    @contextmanager
    def make_file(self) -> Iterator[BinaryIO]:
        """Return a temporary file that the storage process can read by its name. It is removed afterwards."""
        with self._connect():
            folder = self.folder
        file = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115  # Closing it may fail as writing did.
        try:
            yield file  # type: ignore[misc]  # typeshed calls it a wrapper of a file.
        finally:
            with suppress(OSError):
                file.close()

    def adopt(self, folder: Path) -> None:
        """Use the storage process of another process, unless this one has its own. It may have ended."""
        with self._lock:
            if self.folder is None:
                self.folder = folder

    def close(self) -> None:
        """Close all connections, and end the storage process if this process started it and no other one uses it."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()
            if self._lifeline >= 0:
                os.close(self._lifeline)
            folder, self.folder, self._lifeline = self.folder, None, -1
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    if self._process.wait(CLOSE_S) and folder is not None:
                        _remove_unused(folder)  # It was killed, so it could not do this itself.
                self._process.returncode = 0  # It ends by itself when the last process that uses it does.
                self._process = None

    def _exit(self) -> None:
        """Close all because Python exits. Threads that still read ahead must not start another storage process."""
        self._is_exiting = True
        self.close()

    def _try(self, use: Callable[[StorageConnection], Result]) -> Result:
        """Use a connection, and another one if the storage process has died. All requests can be repeated."""
        try:
            return self._repeat(use)
        except _AnsweredError as answered:
            raise answered.error from None

    def _repeat(self, use: Callable[[StorageConnection], Result]) -> Result:
        for _ in range(MAX_DEATHS):
            with suppress(EOFError, ConnectionError), self._connect() as connection:
                return use(connection)
            self._close_idle()
        raise _died()

    def _close_idle(self) -> None:
        """Close the idle connections, which lead to a process that has died."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    @contextmanager
    def _connect(self) -> Iterator[StorageConnection]:
        """Give a connection to the block. It is used again unless the block is interrupted in the middle."""
        with self._lock:
            connection = self._idle.pop() if self._idle else self._open()
        try:
            yield connection
        except _AnsweredError:
            self._idle.append(connection)
            raise
        except BaseException:  # Ctrl-C, too: the rest of an answer must not pass for the next one.
            connection.close()
            raise
        self._idle.append(connection)

    def _open(self) -> StorageConnection:
        """Open a connection. Start the storage process if there is none, it has died, or it does not answer."""
        if (connection := self._try_to_open()) is not None:
            return connection
        if self.folder is None or not self.folder.exists():
            self._start()
        else:
            with WorkLock(self.folder / START_LOCK, START_S).held():
                if (connection := self._try_to_open()) is not None:  # Another process has started one meanwhile.
                    return connection
                self._start()
        assert self.folder is not None
        return connect_to(self.folder, START_S)

    def _try_to_open(self) -> StorageConnection | None:
        """Open a connection; return None if no storage process answers."""
        if self.folder is not None:
            with suppress(FileNotFoundError, ConnectionError):
                return connect_to(self.folder)
            while self._idle:  # They lead to the same process.
                self._idle.pop().close()
        return None

    def _start(self) -> None:
        """Start the storage process. If another one has died, use its folder, where a cache may be."""
        if self._is_exiting:
            raise StoreError("cannot read from an object store while Python exits")
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process.returncode = 0  # It ends when it can, and nobody waits for that.
        if self._lifeline >= 0:
            os.close(self._lifeline)
        folder = self.folder if self.folder is not None and self.folder.exists() else None
        is_new = folder is None
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="shardio-"))
        else:
            (folder / SOCKET).unlink(missing_ok=True)
        read_end, self._lifeline = os.pipe()
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                with name_socket(folder) as name:
                    listener.bind(name)
                listener.listen(128)
                self._process = start_process(
                    "shardio.storage.remote.storage_process:main",
                    [listener.fileno(), read_end, folder, find_world_size()],
                    descriptors=[listener.fileno(), read_end],
                )
            write_process_id(folder, self._process.pid)
        except BaseException:  # Ctrl-C must not leave a folder without a process that removes it.
            if is_new:  # Another one may hold a cache that processes read, and that the next attempt uses again.
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(read_end)
        self.folder = folder

    def _leave_to_parent(self) -> None:
        """Forget the parent's connections and process in a forked child, which has the same storage process."""
        self._lock = threading.Lock()  # Another thread of the parent may have held it.
        for connection in self._idle:
            with suppress(OSError):
                connection.close()
        self._idle = []
        if self._process is not None:
            self._process.returncode = 0  # It is not a child of this process, which cannot wait for it.


class _AnsweredError(Exception):
    """The storage process has answered with an error.

    Args:
        error: The error.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _receive(connection: StorageConnection, expected: type[Message] | tuple[type[Message], ...]) -> Message:
    message = connection.receive()
    if isinstance(message, RequestFailed):
        raise _AnsweredError(message.error)
    assert isinstance(message, expected), f"expected {expected}, got {message!r}"
    return message


def _died(where: str = "") -> StoreError:
    return StoreError(
        "the background process that makes requests to object stores has died or has stopped answering "
        f"{MAX_DEATHS} times{where}: check the memory of this machine"
    )


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a storage process that has died, unless another process has started another one there."""
    try:
        with suppress(BlockingIOError):  # It has many clients.
            connect_socket(folder).close()
    except (FileNotFoundError, ConnectionError):
        shutil.rmtree(folder, ignore_errors=True)


@cache
def client() -> Client:
    """Return this process's client."""
    return Client()
