"""Copy a local folder into a store."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardio.storage import Location, RemoteAccess, parse_location
from shardio.storage.locations import make_options


def upload(folder: Path, url: str, options: Mapping[str, str] | None = None) -> Location:
    """Write each file of a folder to a store. Return the location of the copies."""
    target = parse_location(url, RemoteAccess(options=make_options(options)))
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("."):
            with (target / path.name).write_whole() as file:
                file.write(path.read_bytes())
    return target


def upload_all(folder: Path, url: str, options: Mapping[str, str] | None = None) -> Location:
    """Write each file below a folder to a store, several at a time. Return the location of the copies."""
    target = parse_location(url, RemoteAccess(options=make_options(options)))

    def write(path: Path) -> None:
        with (target / path.relative_to(folder).as_posix()).write_whole() as file:
            file.write(path.read_bytes())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, filter(Path.is_file, folder.rglob("*"))))
    return target
