"""One run at a time writes into a directory."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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

    Rank 0 holds the lock and all ranks learn whether it does, so that they fail together. The lock ends with its
    process, however that ends. Worker processes that torch forks close what they inherit of it, so a killed run can be
    resumed at once, also while its workers are still ending. On NFS it works between machines, too, if the server has
    its lock service. Where a file system has no locks, a warning says so, and nothing keeps a second run out.

    Args:
        directory: The run's directory; None if the run writes nothing.
        world: Which rank this is.

    Raises:
        BusyError: If another run holds it.
        OSError: If the directory cannot be made or written to.
    """
    if directory is None:
        yield
        return
    claim = _claim(directory) if world.rank == 0 else None
    try:
        error = gather(claim if isinstance(claim, Exception) else None)[0]
        if error is not None:
            raise error
        yield
    finally:
        if isinstance(claim, int):
            _held.discard(claim)
            os.close(claim)  # The lock ends with it.


def _claim(directory: Path) -> int | Exception | None:
    """Return the descriptor that holds the lock, None where there are no locks, or why the run cannot have it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        return error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _name_holder(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        return BusyError(
            f"{directory} is in use: {holder} trains into it: wait for it to end, or name another directory"
        )
    except OSError as error:
        os.close(descriptor)
        _log.warning(
            "%s lies on a file system without locks (%s): do not start a second run that writes into it",
            directory,
            error,
        )
        return None
    _held.add(descriptor)
    with suppress(OSError):  # On a full disk: the name is for messages only, the lock holds without it.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"process_id": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return descriptor


_held = set[int]()
"""Descriptors of this process that hold locks."""


def _close_inherited() -> None:
    """In a forked child: close the descriptors, or the child would hold its parent's locks for as long as it lives."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_inherited)


def _name_holder(content: bytes) -> str:
    try:
        holder = parse_json(content)
        return f"process {holder['process_id']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):  # It has the lock, and has not written yet who it is.
        return "another process"
