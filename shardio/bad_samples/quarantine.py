"""The quarantine file, in JSON Lines: one object for each replaced or skipped sample."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from shardio.interruptions import let_through


def check_quarantine(quarantine: str | os.PathLike[str]) -> Path:
    """Check that a quarantine file can be written, and return its absolute path.

    The file is created with the first bad sample, not here.

    Raises:
        TypeError: If the argument is not a path.
        ValueError: If the file cannot be written.
    """
    try:
        path = Path(quarantine).absolute()
    except TypeError:
        raise TypeError(f"quarantine must be a file path, got {quarantine!r}") from None
    if path.is_dir():
        why = "it is a directory"
    elif not path.parent.is_dir():
        why = f"the directory {path.parent} does not exist"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission denied"
    else:
        return path
    raise ValueError(
        f"quarantine={str(quarantine)!r} cannot be written: {why}. Replaced and skipped samples are logged "
        "there: choose a writable file in an existing directory"
    )


def append_entry(path: Path, entry: dict[str, Any]) -> None:
    """Append an entry to the quarantine file.

    Raises:
        OSError: If it cannot be written.
    """
    line = json.dumps(entry, ensure_ascii=False).encode(errors="surrogateescape") + b"\n"
    try:
        # A single short write in append mode, so that lines of several processes do not mix.
        with path.open("ab", buffering=0) as file:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        let_through(error)
        what = f"sample {entry['key'] or entry['sample']} cannot be read, and the quarantine file cannot be written"
        raise OSError(error.errno, f"{what}: {error.strerror or error}", str(path)) from error
