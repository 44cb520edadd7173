"""The files of a directory of class folders, with their labels, as several peers read them."""

from __future__ import annotations

from pathlib import Path


def list_files(root: Path) -> list[tuple[str, int]]:
    """Return the path and the label of each file: the place of its class folder's name among all, sorted."""
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    return [(str(path), label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]
