"""The storage process: the background process that makes all requests to remote stores.

obstore's threads do not survive a fork, and torch's DataLoader forks. So no process that may fork uses obstore itself:
all processes of a training run connect to the storage process that its first process started. It ends when that process
and its forked children have ended and the last connection is closed.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import obstore.exceptions
import obstore.store  # noqa: F401  # Imported now: threads that import it at the same time would see only a part.

from shardio.storage.cache.filling import Filler
from shardio.storage.options import RemoteOptions
from shardio.storage.remote import operations
from shardio.storage.remote.backends import Attempts
from shardio.storage.remote.client import StorageConnection, greet, read_process_id
from shardio.storage.remote.messages import (
    Arrived,
    Create,
    Done,
    Fill,
    FillFiles,
    FindCache,
    ListFolder,
    OpenCached,
    Page,
    ReadRanges,
    ReadWhole,
    Remove,
    Request,
    RequestFailed,
    Stat,
    Walk,
    Write,
    check_key,
)

MAX_THREADS = 64
"""The maximum number of ranges that are read at a time from all stores together."""

MAX_STORES = 16
"""The maximum number of stores, each with its options, that keep connections and threads: those last used."""

CHECK_S = 0.2
"""The time in seconds between two checks of whether the last connections are closed."""

CACHE = "cache"
"""The name of the private cache in the process's folder."""

_SIMPLE: dict[type[Request], Callable[[Attempts, Any], object]] = {
    ReadWhole: operations.read_whole,
    ListFolder: operations.list_folder,
    Write: operations.write,
    Create: operations.create,
    Remove: operations.remove,
}
"""The requests that are answered with one value."""


class StorageProcess:
    """The state of the storage process.

    Args:
        listener: The socket to which other processes connect.
        folder: The folder of the socket and of unfinished uploads. It is removed at the end.
        world_size: The number of ranks. Each rank has its own storage process.
    """

    def __init__(self, listener: socket.socket, folder: Path, world_size: int = 1) -> None:
        self._listener, self._folder, self._world_size = listener, folder, world_size
        self._filler = Filler(folder / CACHE)
        self._stores = OrderedDict[tuple[str, RemoteOptions], Attempts]()
        self._pool = ThreadPoolExecutor(MAX_THREADS)
        self._connections = set[StorageConnection]()
        self._lock = threading.Lock()

    def run(self) -> NoReturn:
        """Accept connections until the process ends."""
        while True:
            end, _ = self._listener.accept()
            connection = StorageConnection(end)
            with suppress(ConnectionError):  # The client has been interrupted.
                greet(connection)
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def end_with_family(self, lifeline: int) -> NoReturn:
        """End the process when no other process holds a connection or the other end of the pipe ``lifeline``."""
        os.read(lifeline, 1)
        while any(map(_is_in_use, list(self._connections))):
            time.sleep(CHECK_S)  # The ends of several sockets cannot be awaited while others serve them.
        if read_process_id(self._folder) in (None, os.getpid()):  # Otherwise, another storage process uses it.
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)  # Nothing waits for the results of running requests.

    def _serve(self, connection: StorageConnection) -> None:
        # These errors mean that the other process has ended or was interrupted.
        with closing(connection), suppress(EOFError, ConnectionError):
            while True:
                self._answer(connection, connection.receive())
        self._connections.discard(connection)

    def _answer(self, connection: StorageConnection, request: Request) -> None:
        value: object = None
        try:
            check_key(request.root, request.key)
            attempts = self._find_store(request)
            match request:
                case Fill():
                    value = self._filler.fill(attempts, request)
                case FillFiles():
                    self._filler.fill_files(attempts, request)
                case ReadRanges():
                    self._send_ranges(connection, attempts, request)
                case FindCache():
                    value = self._filler.find(request.cache)
                case Stat():
                    value = self._filler.stat(attempts, request)
                case OpenCached():
                    value = self._filler.open(attempts, request)
                case Walk():
                    for objects in operations.walk(attempts, request):
                        connection.send(Page(objects=objects))
                case _:
                    if isinstance(request, Write | Create | Remove):
                        self._filler.forget(request)
                    value = _SIMPLE[type(request)](attempts, request)
        except ConnectionError:
            raise
        except Exception as error:
            connection.send(RequestFailed(error=error))
        else:
            connection.send(Done(value=value))

    def _send_ranges(self, connection: StorageConnection, attempts: Attempts, request: ReadRanges) -> None:
        read = partial(operations.read_range, attempts, request)
        if len(request.ranges) == 1:
            contents = iter([read(*request.ranges[0])])
        else:
            reading = [self._pool.submit(read, start, stop) for start, stop in request.ranges]
            contents = (each.result() for each in reading)
        for content in contents:
            connection.send(Arrived())
            connection.send_bytes(content)

    def _find_store(self, request: Request) -> Attempts:
        with self._lock:
            name = request.root, request.options
            if name not in self._stores:
                self._stores[name] = Attempts(*name, self._world_size)
                if len(self._stores) > MAX_STORES:
                    self._stores.popitem(last=False)  # Running requests keep it until they have ended.
            self._stores.move_to_end(name)
            return self._stores[name]


def _is_in_use(connection: StorageConnection) -> bool:
    """Return whether another process holds the other end of a connection."""
    if (descriptor := connection.fileno()) < 0:
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # Only the end of the connection is reported.
    return not poll.poll(0)


def main() -> None:
    """Run the storage process.

    The arguments are the listening socket's descriptor, the lifeline's, the folder and the number of ranks.
    """
    listener, lifeline, folder, world_size = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    process = StorageProcess(socket.socket(fileno=listener), folder, world_size)
    threading.Thread(target=process.end_with_family, args=(lifeline,), daemon=True).start()
    process.run()
