"""Connect this process to its storage process.

The storage process may be suspended, or swapped out, in the middle of an answer. A long wait alone does not show that
the process is suspended, because a request may take minutes. However, the storage process always greets a new
connection immediately. A client that has waited for some time therefore opens another connection. If the client
receives no greeting, it kills the storage process, so no client waits for the process any longer.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from shardio.errors import StoreError
from shardio.files import WorkLock
from shardio.process import call_at_fork, start_process
from shardio.storage.locations import RemoteOptions
from shardio.world import find_world_size

SILENCE_S = 5.0
"""The time in seconds without progress after which a client checks whether the storage process still greets clients."""

GREETING_S = 25.0
"""The time in seconds to wait for a greeting."""

START_S = 60.0
"""The time in seconds to wait for the first greeting of a storage process, which has to import obstore."""

END_S = 5.0
"""The time in seconds to wait for a killed storage process to end. The process may be waiting for a disk."""

CLOSE_S = 0.5
"""The time in seconds to wait for the storage process to end when this process exits. Ending usually takes 10 ms."""

MAX_DEATHS = 3
"""The number of times that the storage process may die before a request fails."""

SOCKET, PROCESS_ID = "socket", "process"
"""The names of the socket in the storage process's folder, and of the file that holds its process ID."""

START_LOCK = "starting"
"""The name of the lock that a process holds while it replaces a storage process."""

MAX_SOCKET_PATH = 100
"""The maximum length in bytes of a socket's path that all operating systems accept: their limits are 103 or more."""

DESCRIPTORS = Path("/proc/self/fd")
"""The folder of a process's open descriptors on Linux. Through a descriptor, any folder has a short path."""

Result = TypeVar("Result")

_STEP_S = 0.5
_LENGTH = struct.Struct("!Q")
_log = logging.getLogger("shardio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one object or folder.

    Attributes:
        operation: The name of the operation, a function of :mod:`shardio.storage.storage_process` or
            :mod:`shardio.storage.operations`.
        root: The root of the store, such as ``s3://bucket``.
        options: The store's settings.
        key: The key of the object or folder.
        arguments: The operation's other arguments.
    """

    operation: str
    root: str
    options: RemoteOptions
    key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of an answer: a value, or None if the content of a range follows as bytes."""

    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of an answer, and the value that the request returns. If the request fails, its error is sent instead."""

    value: Any = None


class SilentError(ConnectionError):
    """The storage process does not answer."""


class StorageConnection:
    """One end of a connection that carries values and bytes.

    Args:
        end: The socket.

    Attributes:
        process_id: The process ID of the storage process, from its greeting.
    """

    process_id = -1

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._when_silent: Callable[[], object] | None = None

    def limit_waits(self, patience_s: float, when_silent: Callable[[], object]) -> None:
        """Call a function when the other end has sent or accepted nothing for ``patience_s`` seconds.

        The wait continues unless the function raises an error.
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
        return pickle.loads(self.receive_bytes())  # Safe: both ends of the connection belong to this user.

    def receive_bytes(self) -> bytearray:
        """Return the next bytes.

        Raises:
            EOFError: If the other end is closed.
        """
        content = bytearray(self._receive_length())
        self._receive_into(memoryview(content))
        return content

    def receive_bytes_into(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes; there must be exactly as many as the buffer holds.

        Raises:
            EOFError: If the other end is closed.
        """
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
        while True:
            with suppress(TimeoutError):
                return transfer(content)
            if self._when_silent is not None:
                self._when_silent()


def connect_to(folder: Path, patience_s: float | None = None) -> StorageConnection:
    """Connect to the storage process of a folder.

    Args:
        folder: The folder.
        patience_s: The time in seconds to wait for a greeting; by default, ``GREETING_S``.

    Raises:
        FileNotFoundError, ConnectionRefusedError: If there is no storage process.
        SilentError: If the storage process does not answer. The function then kills the process.
    """
    patience = _Patience(folder, GREETING_S if patience_s is None else patience_s)
    try:
        connection = StorageConnection(connect_socket(folder))
    except BlockingIOError:
        patience.end()
    try:
        connection.limit_waits(_STEP_S, patience.note_step)
        connection.process_id = connection.receive()
        connection.limit_waits(SILENCE_S, partial(_check_answers, folder, connection.process_id))
    except BaseException:  # Even Ctrl-C must not leave the socket open.
        connection.close()
        raise
    return connection


def connect_socket(folder: Path) -> socket.socket:
    """Return a socket that is connected to a folder's socket but has not received a greeting.

    Raises:
        FileNotFoundError, ConnectionRefusedError: If no process listens on the socket.
        BlockingIOError: If too many other clients are waiting for a greeting.
    """
    end = socket.socket(socket.AF_UNIX)
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GREETING_S), 0))
        with name_socket(folder) as name:
            end.connect(name)
    except BaseException:  # Even Ctrl-C must not leave the socket open.
        end.close()
        raise
    return end


@contextmanager
def name_socket(folder: Path) -> Iterator[str]:
    """Yield a path to a folder's socket. The path is short enough for a socket address.

    Raises:
        StoreError: If there is no path that is short enough.
    """
    path = str(folder / SOCKET)
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        yield path
        return
    if not DESCRIPTORS.is_dir():
        raise StoreError(f"the path {path} is too long for a socket: set TMPDIR to a shorter path")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"{DESCRIPTORS}/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


class _Patience:
    """Limits the time that a client waits for a greeting from a folder's storage process.

    The limit is a number of steps: time during which the client itself is suspended does not count.
    """

    def __init__(self, folder: Path, patience_s: float) -> None:
        self._folder, self._process_id = folder, read_process_id(folder)
        self._patience_s, self._num_left = patience_s, int(patience_s / _STEP_S)

    def note_step(self) -> None:
        self._num_left -= 1
        if self._num_left <= 0:
            self.end()

    def end(self) -> NoReturn:
        """Kill the storage process, unless another client has replaced it in the meantime, and raise a SilentError."""
        if self._process_id is not None and self._process_id == read_process_id(self._folder):
            with suppress(FileNotFoundError, ProcessLookupError):  # Another client is already killing the process.
                (self._folder / PROCESS_ID).unlink()
                os.kill(self._process_id, signal.SIGKILL)
                _log.warning(
                    "shardio's storage process (process %d) did not answer for %g s, perhaps because it was suspended "
                    "or swapped out. It was killed. A new process is started, and unanswered requests are repeated",
                    self._process_id,
                    self._patience_s,
                )
        raise SilentError(f"the storage process of {self._folder} does not answer")


def _check_answers(folder: Path, process_id: int) -> None:
    """Raise a SilentError if the storage process with this ID no longer greets new connections."""
    with suppress(FileNotFoundError, ConnectionRefusedError):  # If the process has ended, the wait ends as well.
        connection = connect_to(folder)
        connection.close()
        if connection.process_id != process_id:
            raise SilentError(f"the storage process of {folder} was replaced")


def read_process_id(folder: Path) -> int | None:
    """Return the process ID of the storage process of a folder; None if the ID is not known yet."""
    try:
        return int((folder / PROCESS_ID).read_text())
    except (FileNotFoundError, ValueError):  # Another process may be writing the file.
        return None


class Client:
    """Makes requests to the storage process. Threads share a client, and forked children keep using it.

    Attributes:
        folder: The folder of the storage process; None before that process is first needed.
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
        """Return the result of a request, or raise its error."""
        return self._try(lambda connection: _receive(connection, request).value)

    def read(self, request: Request) -> list[bytes]:
        """Return the content of each range of a request."""

        def read(connection: StorageConnection) -> list[bytes]:
            contents, message = list[bytes](), _receive(connection, request)
            while isinstance(message, Part):
                contents.append(bytes(connection.receive_bytes()))
                message = _receive(connection)
            return contents

        return self._try(read)

    def read_into(self, request: Request, buffer: memoryview) -> None:
        """Fill a buffer with the content of the only range of a request."""

        def read(connection: StorageConnection) -> None:
            _receive(connection, request)
            connection.receive_bytes_into(buffer)
            _receive(connection)

        self._try(read)

    def walk(self, request: Request) -> Iterator[tuple[str, int, str]]:
        """Yield the key, the size in bytes and the version of each object below a folder."""
        for _ in range(MAX_DEATHS):
            with suppress(EOFError, ConnectionError):
                try:
                    with self._connect() as connection:
                        message = _receive(connection, request)
                        while isinstance(message, Part):
                            yield from message.value
                            if message.value:
                                request = replace(request, arguments={"after": message.value[-1][0]})
                            message = _receive(connection)
                        return
                except _AnsweredError as answered:
                    raise answered.error from None
            with self._lock:
                self._close_idle()
        raise _died(f" while it listed {request.root}/{request.key}")

    @contextmanager
    def make_file(self) -> Iterator[BinaryIO]:
        """Yield a temporary file, which the storage process can read by its name until the end of the block."""
        with self._connect():
            folder = self.folder
        file = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115  # `with` would raise errors from close().
        try:
            yield file  # type: ignore[misc]  # typeshed declares the file as a wrapper.
        finally:
            with suppress(OSError):
                file.close()

    def adopt(self, folder: Path) -> None:
        """Unless this process already has a storage process, use the one in ``folder``, which may have ended."""
        with self._lock:
            if self.folder is None:
                self.folder = folder

    def close(self) -> None:
        """Close all connections. End the storage process if this process started it and no other process uses it."""
        with self._lock:
            self._close_idle()
            if self._lifeline >= 0:
                os.close(self._lifeline)
            folder, self.folder, self._lifeline = self.folder, None, -1
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    if self._process.wait(CLOSE_S) and folder is not None:
                        _remove_unused(folder)  # A killed process cannot remove its folder itself.
                self._process.returncode = 0  # Nothing waits for the process: other processes may still use it.
                self._process = None

    def _exit(self) -> None:
        # Threads that are still reading ahead while Python exits must not start another storage process.
        self._is_exiting = True
        self.close()

    def _try(self, use: Callable[[StorageConnection], Result]) -> Result:
        """Call a function with a connection, and again with a new connection if the storage process has died."""
        for _ in range(MAX_DEATHS):
            try:
                with self._connect() as connection:
                    return use(connection)
            except _AnsweredError as answered:  # noqa: PERF203  # Each attempt may fail.
                raise answered.error from None
            except (EOFError, ConnectionError):  # All requests can be repeated.
                with self._lock:
                    self._close_idle()
        raise _died()

    def _close_idle(self) -> None:
        while self._idle:
            with suppress(OSError):
                self._idle.pop().close()

    @contextmanager
    def _connect(self) -> Iterator[StorageConnection]:
        """Yield a connection, which is reused later unless the ``with`` block is interrupted."""
        with self._lock:
            connection = self._idle.pop() if self._idle else self._open()
        try:
            yield connection
        except _AnsweredError:
            self._idle.append(connection)
            raise
        except BaseException:  # Even after Ctrl-C, the rest of an answer must not be taken for the next answer.
            connection.close()
            raise
        self._idle.append(connection)

    def _open(self) -> StorageConnection:
        """Open a connection. Start the storage process if it does not exist, has died, or does not answer."""
        if (connection := self._try_to_open()) is not None:
            return connection
        if self.folder is None or not self.folder.exists():
            self._start()
        else:
            with WorkLock(self.folder / START_LOCK, START_S).held():
                # Another process may have started the storage process in the meantime.
                if (connection := self._try_to_open()) is not None:
                    return connection
                self._start()
        assert self.folder is not None
        return connect_to(self.folder, START_S)

    def _try_to_open(self) -> StorageConnection | None:
        if self.folder is not None:
            with suppress(FileNotFoundError, ConnectionError):
                return connect_to(self.folder)
            self._close_idle()  # Idle connections belong to the process that has died.
        return None

    def _start(self) -> None:
        """Start the storage process. If a storage process has died, reuse its folder, which may hold a cache."""
        if self._is_exiting:
            raise StoreError("cannot read from an object store while Python is exiting")
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process.returncode = 0  # Nothing waits for the process: it may be waiting for a disk.
        if self._lifeline >= 0:
            os.close(self._lifeline)
        is_new = self.folder is None or not self.folder.exists()
        folder = Path(tempfile.mkdtemp(prefix="shardio-")) if is_new or self.folder is None else self.folder
        (folder / SOCKET).unlink(missing_ok=True)
        read_end, self._lifeline = os.pipe()
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                with name_socket(folder) as name:
                    listener.bind(name)
                listener.listen(128)
                self._process = start_process(
                    "shardio.storage.storage_process:main",
                    [listener.fileno(), read_end, folder, find_world_size()],
                    descriptors=[listener.fileno(), read_end],
                )
            (folder / PROCESS_ID).write_text(str(self._process.pid))
        except BaseException:  # Ctrl-C must not leave a folder without a process that removes it.
            if is_new:  # An older folder may hold a cache that other processes read and that the next attempt reuses.
                shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(read_end)
        self.folder = folder

    def _leave_to_parent(self) -> None:
        """In a forked child, drop the parent's connections, but keep using the parent's storage process."""
        self._lock = threading.Lock()  # Another thread may have held the lock during the fork.
        self._close_idle()
        if self._process is not None:
            self._process.returncode = 0  # This process cannot wait for a child of its parent.


class _AnsweredError(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _receive(connection: StorageConnection, request: Request | None = None) -> Part | Done:
    """Send the request, if one is given, and receive a part of the answer."""
    if request is not None:
        connection.send(request)
    message: Part | Done | Exception = connection.receive()
    if isinstance(message, Exception):
        raise _AnsweredError(message)
    return message


def _died(where: str = "") -> StoreError:
    return StoreError(
        "the background process that makes requests to object stores has died or has stopped answering "
        f"{MAX_DEATHS} times{where}: check the memory of this machine"
    )


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a storage process that has died, unless another storage process uses the folder."""
    try:
        with suppress(BlockingIOError):  # Too many clients are waiting for a new storage process.
            connect_socket(folder).close()
    except (FileNotFoundError, ConnectionError):
        shutil.rmtree(folder, ignore_errors=True)


@cache
def client() -> Client:
    """Return this process's client."""
    return Client()
