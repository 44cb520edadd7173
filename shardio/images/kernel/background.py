"""Compile or check the functions in a background process that outlives this one and keeps none of its files open."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from shardio.files import UntrustedError, make_folder
from shardio.images.kernel.cache_files import (
    lock_path,
    log_path,
    object_name,
    read_check,
    read_object,
    user_folder,
    why_untrusted_file,
)
from shardio.images.kernel.functions import Functions
from shardio.images.kernel.loading import load_functions
from shardio.process import start_process

_NOT_WRITABLE = (
    "shardio cannot compile its JPEG kernel, and uses libjpeg-turbo instead, which is slower: {}. Free some disk "
    "space, or set XDG_CACHE_HOME to a writable folder"
)

_log = logging.getLogger("shardio")


class BackgroundBuild:
    """A background process that compiles the functions if necessary, and checks them.

    The output of the process goes to a file, because an inherited pipe would stay open, and block its reader, until the
    process ends. The process inherits the lock, and holds it for its whole lifetime.

    Args:
        lock: The descriptor that holds the lock. The constructor closes this process's copy.
        log: The file for the standard output and error of the process.
    """

    def __init__(self, lock: int, log: Path) -> None:
        self._log = log
        try:
            with log.open("wb") as output:
                self._process: subprocess.Popen[bytes] | None = start_process(
                    "shardio.images.kernel.background:build_and_remove_log",
                    descriptors=[lock],
                    stdout=output,
                    stderr=output,
                )
        finally:
            os.close(lock)

    def watch(self) -> None:
        """Warn if the process has ended without a usable kernel. This does not wait for the process."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._process = None
        if code:
            _log.warning(
                "shardio could not compile or check its JPEG kernel, and uses libjpeg-turbo instead, which is slower: "
                "the background process ended with exit status %d%s; its output is in %s",
                code,
                _last_line(self._log),
                self._log,
            )
        elif (functions := load_functions()) is not None and (difference := read_check(functions.name)):
            from shardio.images.kernel.building import warn_of_difference

            warn_of_difference(difference)


def can_keep_outcome() -> bool:
    """Create the user's cache folder if necessary, and return whether this user, and no other user, can write to it."""
    try:
        make_folder(user_folder())
    except (UntrustedError, OSError):
        return False
    return os.access(user_folder(), os.W_OK | os.X_OK)


def build_in_background(functions: Functions | None) -> BackgroundBuild | None:
    """Start a process that compiles the functions, unless they are given, and checks them.

    Return None if another process is compiling or checking them, or has just finished, or if a file cannot be written.
    """
    untrusted = why_untrusted_file(object_name()) if functions is None else None
    try:
        make_folder(user_folder())
        lock = _take(lock_path())
    except UntrustedError as error:
        _log.warning(
            "shardio has no JPEG kernel, and uses libjpeg-turbo instead, which is slower: %s. Set XDG_CACHE_HOME to a "
            "folder of your own, change the owner or the mode (chmod go-w), or compile a kernel for all users as root: "
            "python -m shardio.images.kernel --system",
            untrusted or error,
        )
        return None
    except OSError as error:  # The folder or the lock file cannot be written.
        _warn_once(_NOT_WRITABLE.format(error))
        return None
    if lock is None:
        return None
    done = read_object() if functions is None else read_check(functions.name)
    if done is not None:  # Another process has just finished.
        os.close(lock)
        return None
    if functions is None:
        if untrusted is not None:
            _log.warning(
                "shardio is compiling a new JPEG kernel, because it does not trust the existing one: %s", untrusted
            )
        _log.warning(
            "shardio is compiling its JPEG kernel for this machine in the background. This happens once and takes "
            "about half a minute on one core. Until then, shardio uses libjpeg-turbo. (To compile the kernel in "
            "advance, run `python -m shardio.images.kernel`. Errors go to %s.)",
            log_path(),
        )
    try:
        return BackgroundBuild(lock, log_path())
    except OSError as error:
        _warn_once(_NOT_WRITABLE.format(error))
        return None


def build_and_remove_log() -> None:
    """Compile and check the functions in a process that has inherited the lock. Remove the log on success."""
    from shardio.images.kernel.building import build_locked

    try:
        build_locked(user_folder())
    except OSError as error:
        sys.exit(f"{error}")
    log_path().unlink(missing_ok=True)


def _take(path: Path) -> int | None:
    """Take the lock. Return the descriptor that holds it, or None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:  # Even Ctrl-C must not leave the descriptor open.
        os.close(descriptor)
        raise
    return descriptor


@cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def _last_line(log: Path) -> str:
    """Return the last line of a log in parentheses, or an empty string if there is none."""
    with suppress(OSError):
        if line := log.read_text(errors="replace").strip().rpartition("\n")[2]:
            return f" ({line})"
    return ""
