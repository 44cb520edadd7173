"""Use compiled code and cached copies only if no user except this one and root can have written them.

Compiled code runs in the process, so its author acts as this user; cached copies are what this user trains on. A file
is trusted if it and its folder belong to
this user or root, and neither their group nor others may write to them. Python demands less for its own ``.pyc`` files.
OpenSSH demands the same for ``authorized_keys`` (StrictModes). Even the user's private group must not have write
access, because whether a group has other members may depend on a remote directory. Folders further up are not checked.
A user with write access to those can replace files, but only with files that this user or root owns. A POSIX ACL that
grants write access to others shows in the group's bits.

The checks use open descriptors, and the content is read from the same descriptors, so nothing can be replaced between
check and use. Symbolic links are followed, and their targets are checked.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FOLDER_MODE, FILE_MODE = 0o755, 0o644
"""The modes of published folders and files, whatever the umask: all users may load them, only the owner may write."""

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_DIRECTORY", 0)
_NEW_FOLDER = _FOLDER | getattr(os, "O_NOFOLLOW", 0)
_FILE = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)  # A FIFO must not block.


class UntrustedError(Exception):
    """A file is not loaded, because users other than this one and root may have written it."""


def read_trusted(path: Path) -> bytes:
    """Return the content of a trusted file.

    Raises:
        UntrustedError: If the file or its folder belongs to another user, or other users may write to it.
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
            raise UntrustedError(f"{path} is not loaded, because it is not a regular file: remove it")
        return file.read()


def why_untrusted(path: Path) -> str | None:
    """Return why an existing file is not trusted, or None if it is trusted or cannot be read."""
    try:
        read_trusted(path)
    except UntrustedError as error:
        return str(error)
    except OSError:
        pass
    return None


def check_folder(folder: Path) -> None:
    """Raise an UntrustedError if a folder belongs to another user, or other users may write to it."""
    _check(folder.stat(), folder)


def is_trusted(status: os.stat_result) -> bool:
    """Return whether a file or a folder belongs to this user or root, and no other user may write to it."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _WRITABLE


def describe_owner(status: os.stat_result) -> str:
    """Return the owner and the mode of a file or a folder as text, to follow its name."""
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
        descriptor = os.open(part, _NEW_FOLDER)  # By now, the name may be a symbolic link.
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
