"""The directory of a run: one run at a time writes to it, and none overwrites another."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardio.errors import BusyError, StateError
from shardio.forks import call_at_fork
from shardio.json_text import parse_json
from shardio.train.checkpoint import BEST, LAST, load_checkpoint
from shardio.train.config import TrainConfig
from shardio.train.logs import LOG, read_log
from shardio.train.ranks import gather, on_rank_0
from shardio.train.report import PAGE, PICTURE
from shardio.whole_writes import remove_unfinished

LOCK = ".run.lock"

_log = logging.getLogger("shardio")


@contextmanager
def claimed(directory: Path | None) -> Iterator[None]:
    """Hold the lock of a run's directory, and create the directory if it is missing.

    Without a directory, do nothing. Rank 0 holds the lock for all ranks, which fail together. The
    lock ends with its process. Worker processes that torch forks close their copy of the lock's
    descriptor, so a killed run can be resumed while its workers still exist. On NFS, the lock
    works between machines if the server has a lock service. On a file system without locks, a
    warning is logged.

    Raises:
        BusyError: If another run holds the lock.
        OSError: If the directory cannot be created or written to.
    """
    lock = _Lock()  # Only rank 0 takes it.
    try:
        if directory is not None:
            on_rank_0(lambda: lock.take(directory))
        yield
    finally:
        lock.release()


class _Lock:
    """The lock of a run's directory.

    A forked child releases its copy, which would otherwise hold the lock until the child ends.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        call_at_fork(self, after_in_child=_Lock.release)

    def take(self, directory: Path) -> None:
        """Take the lock, unless the file system has none."""
        self._descriptor = _lock(directory)

    def release(self) -> None:
        """Release the lock if this process holds it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _lock(directory: Path) -> int | None:
    """Return the descriptor that holds the lock; None if the file system has no locks."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _name_holder(os.pread(descriptor, 4096, 0))
        os.close(descriptor)
        raise BusyError(
            f"{directory} is in use by {holder}, which is training there: wait for it to end, or use another directory"
        ) from None
    except OSError as error:
        os.close(descriptor)
        _log.warning(
            "%s is on a file system without locks (%s): do not start a second run that writes there", directory, error
        )
        return None
    with suppress(OSError):  # On a full disk, the lock holds even if the holder's name is not written.
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"process_id": os.getpid(), "host": socket.gethostname()}).encode(), 0)
    return descriptor


def _name_holder(content: bytes) -> str:
    try:
        holder = parse_json(content)
        return f"process {holder['process_id']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):  # The holder has not written its name yet.
        return "another process"


def prepare_directory(directory: Path, config: TrainConfig) -> bool:
    """Remove outdated files, and return whether there is a checkpoint to resume from.

    Raises:
        StateError: If ranks see different directories, or the directory holds another tool's log
            or a run without its last checkpoint. In these cases, nothing is removed.
        FormatError: If the best checkpoint cannot be read.
    """
    last = directory / LAST
    if len(set(gather(last.exists()))) > 1:
        raise StateError(f"only some ranks see {last}: use a directory that all ranks share")
    return on_rank_0(lambda: _prepare(directory, config))


def _prepare(directory: Path, config: TrainConfig) -> bool:
    last_epoch = max((line["epoch"] for line in read_log(directory / LOG)), default=None)
    has_last = (directory / LAST).exists()
    if config.resume and not has_last and not _may_start_over(directory / BEST, config, last_epoch):
        found = BEST if (directory / BEST).exists() else f"{LOG} (up to epoch {last_epoch})"
        raise StateError(
            f"{directory} contains the {found} of an earlier run, but no {LAST} to resume from: restore {LAST}, use "
            "another directory, or replace the earlier run with resume=False (--fresh)"
        )
    remove_unfinished(directory, (LAST, BEST, LOG, PAGE, PICTURE))
    for name in () if config.resume else (LAST, BEST):
        (directory / name).unlink(missing_ok=True)
    return has_last and config.resume


def _may_start_over(best: Path, config: TrainConfig, last_epoch: int | None) -> bool:
    """Return whether a run without its last checkpoint was killed in its first epoch, before it could write one.

    Its log then ends in epoch 0. Its best checkpoint, which is written first, is of that epoch and
    of the same settings.
    """
    if not best.exists():
        return not last_epoch
    if last_epoch != 0:
        return False
    state = load_checkpoint(best)
    return len(state["results"]) == 1 and not config.find_differences(state["config"])
