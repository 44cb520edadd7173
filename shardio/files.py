"""Write files atomically, lock work, and check which files other users may have written.

Compiled code runs with the rights of this user, and training reads cached copies, so other users must not be able to
write to either. A file is *trusted* if it and its folder belong to this user or root, and neither their group nor
others may write to them. Python demands less for its own ``.pyc`` files; OpenSSH demands the same for
``authorized_keys`` (StrictModes). Even the user's private group must not have write access, because a remote directory
may add members to it. Folders further up are not checked. Another user with write access to a folder further up can
replace files, but only with files that this user or root owns. A POSIX ACL that grants write access to others is
visible in the group's permission bits.

The checks use open descriptors, and the content is read from the same descriptors, so nothing can be replaced between
check and use. Symbolic links are followed, and their targets are checked.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger("shardio")

PARTIAL_SUFFIX = ".partial"
"""The suffix of the hidden files that hold unfinished content."""

_UNFINISHED = re.compile(rf"\.(?P<target>.+)\.[0-9a-f]{{8}}{re.escape(PARTIAL_SUFFIX)}", re.DOTALL)

POLL_S = 0.05
"""The interval between attempts to take a lock, in seconds."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A FIFO must not block.

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""The modes of published folders and files, regardless of the umask: all users may read, only the owner may write."""

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH

_FOLDER = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0)

_NEW_FOLDER = _FOLDER | getattr(os, "O_NOFOLLOW", 0)

_FILE = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)  # A FIFO must not block.


@contextmanager
def write_whole(path: Path, *, mode: int | None = None) -> Iterator[BinaryIO]:
    """Open a file for writing. The file appears whole or not at all.

    The content goes to a hidden file in the same directory. This file is synced to disk and renamed at the end. If the
    block raises, the hidden file is removed and ``path`` stays as it was.

    Args:
        path: The file to write.
        mode: The file's permissions, regardless of the umask; by default, those of any new file.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full. The error names ``path``.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL_SUFFIX}")
    try:
        with naming(path):
            with os.fdopen(_create(temporary, mode), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(path.parent)
    except BaseException:  # Even Ctrl-C must not leave a partial file.
        temporary.unlink(missing_ok=True)
        raise


def create_whole(path: Path, content: bytes) -> bool:
    """Write a file unless the path exists. The file appears only when it is complete. Return whether it was written.

    Raises:
        OSError: If the file cannot be written, or the file system has no hard links.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL_SUFFIX}")
    try:
        with write_whole(temporary) as file:
            file.write(content)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
    return True


def find_target(name: str) -> str | None:
    """Return the final name of an unfinished file; None if ``name`` is not the name of an unfinished file."""
    found = _UNFINISHED.fullmatch(name)
    return None if found is None else found["target"]


def remove_unfinished(directory: Path, targets: Container[str] | None = None) -> None:
    """Remove the unfinished files of a killed process from a directory that no other process writes to.

    Args:
        directory: The directory.
        targets: The names of the files whose unfinished versions are removed; None for any.
    """
    for path in directory.iterdir():
        target = find_target(path.name)
        if target is not None and (targets is None or target in targets):
            path.unlink()


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Add the name of a file or an object to an OSError that does not name it, such as one from a write."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None and str(path) not in str(error):
            error.filename = str(path)
        raise


def _create(path: Path, mode: int | None) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666 if mode is None else mode)
    if mode is not None:
        os.fchmod(descriptor, mode)
    return descriptor


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # Some file systems cannot sync directories.
            raise
    finally:
        os.close(descriptor)


class WorkLock:
    """A lock file, which keeps processes from doing the same work at the same time.

    The results of the work must not depend on the lock, because it is ineffective if the file system has no locks, or
    if the process that holds it is suspended. After waiting for ``patience_s``, this process logs a warning that names
    the holder, and continues without the lock. Later attempts to take the lock try only once, until one succeeds.
    Threads can share the lock.

    Args:
        path: The lock file, which is created if it does not exist, and never removed.
        patience_s: The longest wait for another process, in seconds. Choose a time longer than the work usually takes.
        mode: The file's permissions if this user creates it.
    """

    def __init__(self, path: Path, patience_s: float, mode: int = 0o600) -> None:
        self._path, self._patience_s, self._mode = path, patience_s, mode
        self._is_stuck = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock while the block runs, unless another process holds it for too long."""
        descriptor = self._open()
        try:
            is_ours = descriptor is not None and self._take(descriptor)
            try:
                yield
            finally:
                if descriptor is not None and is_ours:
                    # Closing the descriptor is not enough: a forked child may have a copy of it.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self) -> int | None:
        try:
            descriptor = os.open(self._path, _FLAGS, self._mode)
        except OSError:
            return None  # The error is reported when the result is written.
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != self._mode:  # Regardless of the umask.
            os.fchmod(descriptor, self._mode)
        return descriptor

    def _take(self, descriptor: int) -> bool:
        num_tries = 1 if self._is_stuck else 1 + int(self._patience_s / POLL_S)
        for tried in range(num_tries):  # Count tries: a clock also runs while this process is suspended.
            if tried:
                time.sleep(POLL_S)  # flock(2) has no timeout.
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                    raise
                return False
            self._is_stuck = False
            with suppress(OSError):  # On a full disk, the lock works, but does not name its holder.
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return True
        if not self._is_stuck:
            self._is_stuck = True
            holder = os.pread(descriptor, 256, 0).decode(errors="replace")
            _log.warning(
                "%s has been locked for more than %g s by another process (%s), which is slow or suspended: this "
                "process (%d) continues without the lock",
                self._path,
                self._patience_s,
                holder if holder.isprintable() and holder else "unknown",
                os.getpid(),
            )
        return False


class UntrustedError(Exception):
    """A file is not loaded, because users other than this one and root may have written it."""


def read_trusted(path: Path) -> bytes:
    """Return the content of a trusted file.

    Raises:
        UntrustedError: If the file or its folder belongs to another user, or other users may write to it.
        OSError: If the file cannot be read.
    """
    folder = os.open(path.parent, _FOLDER)
    try:
        _check(os.fstat(folder), path.parent)
        descriptor = os.open(path.name, _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check(status, path)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{path} is not loaded, because it is not a regular file: remove it")
        return file.read()


def why_untrusted(path: Path) -> str | None:
    """Return the reason why an existing file is not trusted; None if it is trusted or cannot be read."""
    try:
        read_trusted(path)
    except UntrustedError as error:
        return str(error)
    except OSError:
        pass
    return None


def check_folder(folder: Path) -> None:
    """Raise UntrustedError if a folder belongs to another user, or other users may write to it."""
    _check(folder.stat(), folder)


def is_trusted(status: os.stat_result) -> bool:
    """Return whether a file or a folder belongs to this user or root, and no other user may write to it."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _WRITABLE


def describe_owner(status: os.stat_result) -> str:
    """Return the owner and the mode of a file or a folder as text to append to its name."""
    return f"belongs to {_name_user(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):04o}"


def make_folder(folder: Path) -> None:
    """Create a folder and its parent, which other users may read but not write to.

    If the folder exists and belongs to this user, other users lose write access to it. Folders further up follow the
    umask.

    Raises:
        UntrustedError: If the folder belongs to another user, or other users may write to it.
        OSError: If the folder cannot be created.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for part in (folder.parent, folder):
        try:
            part.mkdir()
        except FileExistsError:
            continue
        descriptor = os.open(part, _NEW_FOLDER)  # The folder may have been replaced by a symbolic link.
        try:
            os.fchmod(descriptor, FOLDER_MODE)
        finally:
            os.close(descriptor)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _WRITABLE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_WRITABLE)
    check_folder(folder)


def _check(status: os.stat_result, path: Path) -> None:
    if is_trusted(status):
        return
    what = "folder" if stat.S_ISDIR(status.st_mode) else "file"
    raise UntrustedError(
        f"the {what} {path} {describe_owner(status)}: compiled code is loaded only if its file and folder belong to "
        f"this user ({_name_user(os.geteuid())}) or root, and no other user can write to them"
    )


def _name_user(user_id: int) -> str:
    try:
        import pwd

        return f"{pwd.getpwuid(user_id).pw_name} (uid {user_id})"
    except (ImportError, KeyError):
        return f"uid {user_id}"
