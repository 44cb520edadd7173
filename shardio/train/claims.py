"""One run at a time writes into a directory."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardio.errors import BusyError
from shardio.json_text import parse_json
from shardio.train.ranks import gather
from shardio.world import World

LOCK = ".run.lock"

_log = logging.getLogger("shardio")


@contextmanager
def claimed(directory: Path | None, world: World) -> Iterator[None]:
    """Hold a run's directory for the ranks of one run, as long as the block lasts; make it if it is missing.

    Rank 0 holds the lock and all ranks learn whether it does, so that they fail together. It is a POSIX record lock,
    which ends with its process, however that ends, and is not inherited by the worker processes that torch forks: a
    killed run can be resumed at once, also while its workers are still ending. It does not tell threads of one process
    apart. On NFS such locks work between machines, too, as long as the server has its lock service. Where a file system
    has no locks, a warning says so, and nothing keeps a second run out.

    Args:
        directory: The run's directory; None if the run writes nothing.
        world: Which rank this is.

    Raises:
        BusyError: If another run holds it.
    """
    if directory is None:
        yield
        return
    descriptor, busy = _claim(directory) if world.rank == 0 else (None, None)
    try:
        busy = gather(busy)[0]
        if busy is not None:
            raise BusyError(busy)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # The lock ends with it.


def _claim(directory: Path) -> tuple[int | None, str | None]:
    """Return the descriptor that holds the lock, if there is one; or the message that another run holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES.
        holder = _name_holder(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        return None, f"{directory} is in use: {holder} trains into it: wait for it to end, or name another directory"
    except OSError as error:
        os.close(descriptor)
        _log.warning(
            "%s lies on a file system without locks (%s): do not start a second run that writes into it",
            directory,
            error,
        )
        return None, None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"process_id": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return descriptor, None


def _name_holder(content: bytes) -> str:
    try:
        holder = parse_json(content)
        return f"process {holder['process_id']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):  # It has the lock, and has not written yet who it is.
        return "another process"
