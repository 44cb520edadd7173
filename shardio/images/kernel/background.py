"""Compile the kernel in a background process, which outlives this one and keeps none of its files open."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from shardio.background import start_process
from shardio.images.kernel.loading import kernel_path, read_kernel, why_untrusted_kernel
from shardio.images.trust import UntrustedError, make_folder

_NO_PLACE = (
    "shardio cannot compile its JPEG decoder here, and libjpeg-turbo decodes, more slowly: {}. Make room there, or "
    "point XDG_CACHE_HOME at a folder that can be written"
)

_log = logging.getLogger("shardio")


class BackgroundBuild:
    """A background process that compiles the kernel.

    Its standard error is a file: a pipe of this process would stay open, and its reader wait, until the kernel is
    compiled. The process inherits the lock and holds it until it ends, however it ends.

    Args:
        lock: The descriptor that holds the lock. It is closed here.
        log: Where its standard output and error go.
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
        """Warn if the process has ended without a kernel that can be used; wait for nothing."""
        if self._process is None or (code := self._process.poll()) is None:
            return
        self._process = None
        if code:
            _log.warning(
                "shardio could not compile its JPEG decoder: the background process ended with exit status %d%s, and "
                "what it wrote is in %s. libjpeg-turbo decodes, more slowly.",
                code,
                _last_line(self._log),
                self._log,
            )
        elif (kernel := read_kernel()) is not None and not kernel[1]:
            from shardio.images.kernel.building import say_unused

            _log.warning("%s", say_unused(kernel[0]))


def build_in_background() -> BackgroundBuild | None:
    """Start a process that compiles the kernel, and say so; return None if that is done, under way or impossible."""
    if read_kernel() is not None:  # One that must not be used.
        return None
    path, untrusted = kernel_path(), why_untrusted_kernel()
    try:
        make_folder(path.parent)
        lock = _take(path.with_suffix(".lock"))
    except UntrustedError as error:
        _log.warning(
            "shardio has no JPEG kernel here, and libjpeg-turbo decodes, more slowly: %s. Point XDG_CACHE_HOME at a "
            "folder of your own, change the owner or the mode (chmod go-w), or compile a kernel for all users as root: "
            "python -m shardio.images.kernel --system",
            untrusted or error,
        )
        return None
    except OSError as error:  # Nothing can be written or locked there.
        _warn_once(_NO_PLACE.format(error))
        return None
    if lock is None:
        return None
    if read_kernel() is not None:  # Another process has just compiled it.
        os.close(lock)
        return None
    if untrusted is not None:
        _log.warning("shardio does not load a JPEG kernel that is there, and compiles its own: %s", untrusted)
    log = path.with_suffix(".log")
    _log.warning(
        "shardio compiles its JPEG decoder for this machine, in the background: once, for about half a minute of one "
        "core. Until then libjpeg-turbo decodes. (`python -m shardio.images.kernel` does it beforehand. Errors go to "
        "%s.)",
        log,
    )
    try:
        return BackgroundBuild(lock, log)
    except OSError as error:
        _warn_once(_NO_PLACE.format(error))
        return None


def build_and_remove_log() -> None:
    """Compile the kernel, in a process that inherited the lock; what it wrote is removed if that succeeds."""
    from shardio.images.kernel.building import build_locked

    try:
        build_locked(kernel_path())
    except OSError as error:
        sys.exit(f"{error}")
    kernel_path().with_suffix(".log").unlink(missing_ok=True)


def _take(path: Path) -> int | None:
    """Return a descriptor that holds the lock that filelock uses, too; None if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:  # Ctrl-C as well must not leave it open.
        os.close(descriptor)
        raise
    return descriptor


@cache
def _warn_once(message: str) -> None:
    _log.warning("%s", message)


def _last_line(log: Path) -> str:
    """Return the last line of a log in brackets; nothing if there is none."""
    with suppress(OSError):
        if line := log.read_text(errors="replace").strip().rpartition("\n")[2]:
            return f" ({line})"
    return ""
