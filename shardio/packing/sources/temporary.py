"""A temporary folder for the uncompressed files of a source."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

from shardio.errors import PackError
from shardio.interruptions import let_through
from shardio.storage import parse_location


class TemporaryFolder:
    """A folder that is removed with this object, or when the process that made it ends.

    Worker processes receive a copy of this object, which leaves the folder alone.

    Args:
        num_bytes: The size of the files that it will hold.
        src: The source that they come from, for messages.

    Attributes:
        path: The folder.

    Raises:
        PackError: If the disk has too little space for the files.
    """

    def __init__(self, num_bytes: int, src: Path) -> None:
        parent = Path(tempfile.gettempdir())
        free = shutil.disk_usage(parent).free
        if free < num_bytes:
            raise PackError(
                f"{src} is compressed. Its files have {num_bytes} bytes when they are decompressed, but {parent} has "
                f"only {free} bytes of free space: set the environment variable TMPDIR to a folder on a larger disk"
            )
        self.path = Path(tempfile.mkdtemp(prefix="shardio-", dir=parent))
        weakref.finalize(self, _remove, self.path, os.getpid())

    def __getstate__(self) -> Path:
        return self.path

    def __setstate__(self, path: Path) -> None:
        self.path = path


def find_folder(src: Path, unpacked: TemporaryFolder | None, name: str) -> Path:
    """Return the folder that has a file: the one for decompressed files, or the source itself."""
    return unpacked.path if unpacked is not None and (unpacked.path / name).exists() else src


def unpack(src: Path, dst: Path, num_bytes: int, decompress: Callable[[bytes], bytes]) -> None:
    """Decompress a file.

    Args:
        src: The file.
        dst: The new file.
        num_bytes: The least size of the new file.
        decompress: Returns the decompressed content of a file.

    Raises:
        PackError: If the file is damaged.
    """
    try:
        content = decompress(parse_location(src).read_whole())
    except Exception as error:  # Each algorithm raises its own.
        let_through(error)
        raise PackError(f"{src} cannot be decompressed: {error}. Download or create it again") from error
    if len(content) < num_bytes:
        raise PackError(f"{src} has {len(content)} bytes when it is decompressed, not {num_bytes}: create it again")
    dst.parent.mkdir(parents=True, exist_ok=True)
    with parse_location(dst).write_whole() as file:
        file.write(content)


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # And not in a fork of it.
        shutil.rmtree(path, ignore_errors=True)
