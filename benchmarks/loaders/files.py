"""List the files of class folders with their labels, for the peers that read files."""

from __future__ import annotations

from pathlib import Path


def list_files(root: Path) -> list[tuple[str, int]]:
    """Return the path and the label of each file. A label is the index of the class folder among the sorted names."""
    folders = sorted(path for path in root.iterdir() if path.is_dir())
    return [(str(path), label) for label, folder in enumerate(folders) for path in sorted(folder.iterdir())]
