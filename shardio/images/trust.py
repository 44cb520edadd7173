"""Which files may be run as code: those that only this user and root can have written.

Compiled code is loaded into the process, so its author acts as this user. A file is trusted if it and its folder belong
to this user or root, and neither its group nor others may write to them. That is stricter than what Python asks of its
own ``.pyc`` files, and like what OpenSSH asks of ``authorized_keys`` (StrictModes). A private group of the user is not
accepted, since whether a group has other members may depend on a remote directory. Folders further up are not examined:
a user who may write to those can exchange files, but only for others that this user or root owns. A POSIX ACL that lets
others write shows in the group's bits.

The checks look at open descriptors, and the content is read from the same ones, so nothing can be exchanged between the
check and the use. Symbolic links are followed: what they lead to is checked.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""What is published has these modes, whatever the umask: all users may load it, and only its owner may change it."""

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0)
_NEW_FOLDER = _FOLDER | getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)  # A FIFO must not block.


class UntrustedError(Exception):
    """A file is not loaded, since others than this user and root may have written it."""


def read_trusted(path: Path) -> bytes:
    """Return a file's content, if the file is trusted.

    Raises:
        UntrustedError: If it, or its folder, belongs to others or may be written by others.
        OSError: If it cannot be read.
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
            raise UntrustedError(f"{path} is not loaded, since it is not a regular file: remove it")
        return file.read()


def why_untrusted(path: Path) -> str | None:
    """Return why a file that is there is not trusted; None if it is, or cannot be read."""
    try:
        read_trusted(path)
    except UntrustedError as error:
        return str(error)
    except OSError:
        pass
    return None


def check_folder(folder: Path) -> None:
    """Raise an UntrustedError if others may write to a folder."""
    _check(folder.stat(), folder)


def make_folder(folder: Path) -> None:
    """Make a folder, and the one above it, that others may read and not write to.

    If it is there and belongs to this user, others lose the right to write to it. Folders further up are made as the
    umask says.

    Raises:
        UntrustedError: If it belongs to another user, or others may write to it.
        OSError: If it cannot be made.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for part in (folder.parent, folder):
        try:
            part.mkdir()
        except FileExistsError:
            continue
        descriptor = os.open(part, _NEW_FOLDER)  # Not by its name, which may lead elsewhere by now.
        try:
            os.fchmod(descriptor, FOLDER_MODE)
        finally:
            os.close(descriptor)
    status = folder.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _WRITABLE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_WRITABLE)
    check_folder(folder)


def _check(status: os.stat_result, path: Path) -> None:
    if status.st_uid in (0, os.geteuid()) and not status.st_mode & _WRITABLE:
        return
    what = "folder" if stat.S_ISDIR(status.st_mode) else "file"
    raise UntrustedError(
        f"the {what} {path} belongs to {_name_user(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):04o}: "
        f"compiled code is loaded only if its file and folder belong to this user "
        f"({_name_user(os.geteuid())}) or root and nobody else may write to them"
    )


def _name_user(user_id: int) -> str:
    try:
        import pwd

        return f"{pwd.getpwuid(user_id).pw_name} (uid {user_id})"
    except (ImportError, KeyError):
        return f"uid {user_id}"
