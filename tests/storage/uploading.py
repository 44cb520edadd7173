"""Copy a local folder into a store."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardio.storage import Location, make_direct_access, parse_location


def put_all(folder: Path, target: Location) -> Location:
    """Write each file below a folder to a store, several at a time. Return the location of the copies."""

    def write(path: Path) -> None:
        with (target / path.relative_to(folder).as_posix()).write_whole() as file:
            file.write(path.read_bytes())

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, filter(Path.is_file, folder.rglob("*"))))
    return target


def upload(folder: Path, url: str, options: Mapping[str, str] | None = None) -> Location:
    return put_all(folder, parse_location(url, make_direct_access(options)))
