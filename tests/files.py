"""What lies in a directory, and what this process holds open."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardio.storage import Location


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a directory by its name; nothing if there is no such directory."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def flip(path: Path, offset: int, mask: int = 1) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def read_parts(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return the content of each file in each directory of a directory."""
    return {path.name: read_files(path) for path in folder.iterdir()}


def count_open_files() -> int:
    """Return how many descriptors this process holds."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let every write fail that makes a file larger; Python ignores the signal that the system sends as well."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read_objects(folder: Location) -> dict[str, bytes]:
    """Return the content of each object in a folder of any store by its name."""
    return {name: (folder / name).read_whole() for name in folder.list()}
