"""What lies in a directory, and what this process holds open."""

from __future__ import annotations

from pathlib import Path


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a directory by its name; nothing if there is no such directory."""
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def count_open_files() -> int:
    """Return how many descriptors this process holds."""
    return len(list(Path("/proc/self/fd").iterdir()))
