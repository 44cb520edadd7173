"""The class names that users pass to pack and repair."""

from __future__ import annotations

from pathlib import Path

from shardio.classes import check_classes
from shardio.cli.loading import find_class_folders, has_class_folders
from shardio.shards import open_table
from shardio.storage import RemoteAccess, parse_location, read_as_utf8


def read_classes(source: Path, access: RemoteAccess | None = None) -> tuple[str, ...]:
    """Return the class names in a text file or of a dataset."""
    if source.is_file() and source.suffix != ".json":
        return check_classes(_read_lines(source))
    if has_class_folders(source, access):
        return check_classes(sorted(map(read_as_utf8, find_class_folders(parse_location(source, access)))))
    return check_classes(open_table(source, access).manifest)


def _read_lines(path: Path) -> list[str]:
    """Return a text file's lines without empty lines at its end.

    Raises:
        ValueError: If another line is empty, or the file is not UTF-8.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not a UTF-8 text file: pass a text file with one class name per line, a packed directory, or "
            "class folders"
        ) from error
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            raise ValueError(
                f"line {line_number} of {path} is empty, but each line defines a label: delete it or write a class name"
            )
    return lines
