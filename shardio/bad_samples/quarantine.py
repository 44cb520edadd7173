"""The quarantine file: one JSON object a line for each sample that was replaced or skipped."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from shardio.interruptions import let_through


def check_quarantine(quarantine: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a quarantine file, after checking that it can be written.

    The file is not created before there is a bad sample.

    Raises:
        TypeError: If the argument is not a path.
        ValueError: If the file cannot be written.
    """
    try:
        path = Path(quarantine).absolute()
    except TypeError:
        raise TypeError(f"quarantine must be the path of a file, got {quarantine!r}") from None
    if path.is_dir():
        why = "it is a directory"
    elif not path.parent.is_dir():
        why = f"there is no directory {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "this process has no permission to write it"
    else:
        return path
    raise ValueError(
        f"quarantine={str(quarantine)!r} cannot be written: {why}. Replaced and skipped samples are logged "
        "there: name a file in an existing directory"
    )


def append_entry(path: Path, entry: dict[str, Any]) -> None:
    """Append a line to the quarantine file.

    Raises:
        OSError: If it cannot be written.
    """
    line = json.dumps(entry, ensure_ascii=False).encode(errors="surrogateescape") + b"\n"
    try:
        # One short write to a file that is open for appending: lines of several processes do not mix.
        with path.open("ab", buffering=0) as file:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        let_through(error)
        what = f"sample {entry['key'] or entry['sample']} is bad, and the quarantine file cannot be written"
        raise OSError(error.errno, f"{what}: {error.strerror or error}", str(path)) from error
