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
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from shardio.background import start_process
from shardio.errors import StoreError
from shardio.forks import call_at_fork
from shardio.storage.remote.messages import Arrived, Done, Page, ReadRanges, Request, RequestFailed, Walk
from shardio.world import find_world_size

Result = TypeVar("Result")
Message = TypeVar("Message")

MAX_DEATHS = 3
"""How often one request may find that the storage process has died."""

CLOSE_S = 0.5
"""How long to wait for the storage process to end when this process exits. It usually takes 10 ms."""

SOCKET = "socket"
"""The name of the socket in the storage process's folder."""

MAX_SOCKET_PATH = 100
"""The longest path of a socket in bytes that all operating systems accept: they limit it to 103 or more."""

DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux has a process's open folders. They give long paths short names."""


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
        self._idle: list[Connection] = []
        call_at_fork(self, after_in_child=Client._leave_to_parent)
        self._is_exiting = False
        atexit.register(self._exit)

    def ask(self, request: Request) -> Any:
        """Return what a request returns, or raise its error."""

        def ask(connection: Connection) -> Any:
            connection.send(request)
            return _receive(connection, Done).value

        return self._try(ask)

    def read(self, request: ReadRanges) -> list[bytes]:
        """Return the content of each range."""

        def read(connection: Connection) -> list[bytes]:
            connection.send(request)
            contents = list[bytes]()
            for _ in request.ranges:
                _receive(connection, Arrived)
                contents.append(connection.recv_bytes())
            _receive(connection, Done)
            return contents

        return self._try(read)

    def read_into(self, request: ReadRanges, buffer: memoryview) -> None:
        """Fill a buffer with the content of the only range."""

        def read(connection: Connection) -> None:
            connection.send(request)
            _receive(connection, Arrived)
            connection.recv_bytes_into(buffer)
            _receive(connection, Done)

        self._try(read)

    def walk(self, request: Walk) -> Iterator[tuple[str, int, str]]:
        """Yield the key, the size in bytes and the version of each object below a folder."""
        try:
            with self._connect() as connection:
                connection.send(request)
                while isinstance(page := _receive(connection, (Page, Done)), Page):
                    yield from page.objects
        except _AnsweredError as answered:
            raise answered.error from None
        except (EOFError, ConnectionError):
            raise StoreError(
                f"the background process that makes requests to object stores has died while it listed {request.root}/"
                f"{request.key}: try again, and check the memory of this machine"
            ) from None

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

    def _try(self, use: Callable[[Connection], Result]) -> Result:
        """Use a connection, and another one if the storage process has died. All requests can be repeated."""
        try:
            return self._repeat(use)
        except _AnsweredError as answered:
            raise answered.error from None

    def _repeat(self, use: Callable[[Connection], Result]) -> Result:
        for _ in range(MAX_DEATHS):
            with suppress(EOFError, ConnectionError), self._connect() as connection:
                return use(connection)
            with self._lock:  # The others lead to the same process, which has died.
                while self._idle:
                    self._idle.pop().close()
        raise StoreError(
            f"the background process that makes requests to object stores has died {MAX_DEATHS} times in a row: check "
            "the memory of this machine"
        )

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        """Give a connection to the block. It is used again unless the block is interrupted in the middle."""
        with self._lock:
            connection = self._idle.pop() if self._idle else self._open()
        try:
            yield connection
        except _AnsweredError:
            self._idle.append(connection)
            raise
        except BaseException as error:  # Ctrl-C, too: the rest of an answer must not pass for the next one.
            connection.close()
            if isinstance(error, OSError) and error.errno is None:  # The storage process died while it sent a message.
                raise EOFError(str(error)) from None
            raise
        self._idle.append(connection)

    def _open(self) -> Connection:
        """Open a connection. Start the storage process if there is none, or it has died."""
        if self.folder is not None:
            try:
                return _connect_to(self.folder)
            except (FileNotFoundError, ConnectionError):
                self._idle.clear()
        self._start()
        assert self.folder is not None
        return _connect_to(self.folder)

    def _start(self) -> None:
        """Start the storage process. If another one has died, use its folder, where a cache may be."""
        if self._is_exiting:
            raise StoreError("cannot read from an object store while Python exits")
        if self._process is not None:
            self._process.kill()
            self._process.wait()
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
                with _name_socket(folder) as name:
                    listener.bind(name)
                listener.listen(128)
                self._process = start_process(
                    "shardio.storage.remote.storage_process:main",
                    [listener.fileno(), read_end, folder, find_world_size()],
                    descriptors=[listener.fileno(), read_end],
                )
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


def _receive(connection: Connection, expected: type[Message] | tuple[type[Message], ...]) -> Message:
    message = connection.recv()
    if isinstance(message, RequestFailed):
        raise _AnsweredError(message.error)
    assert isinstance(message, expected), f"expected {expected}, got {message!r}"
    return message


@contextmanager
def _name_socket(folder: Path) -> Iterator[str]:
    """Give the block a path of the socket in a folder. The folder's own path may be too long for sockets."""
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


def _connect_to(folder: Path) -> Connection:
    end = socket.socket(socket.AF_UNIX)
    try:
        with _name_socket(folder) as name:
            end.connect(name)
    except BaseException:  # Ctrl-C must not leave the socket open either.
        end.close()
        raise
    return Connection(end.detach())


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a storage process that has died, unless another process has started another one there."""
    try:
        _connect_to(folder).close()
    except (FileNotFoundError, ConnectionError):
        shutil.rmtree(folder, ignore_errors=True)


@cache
def client() -> Client:
    """Return this process's client."""
    return Client()
