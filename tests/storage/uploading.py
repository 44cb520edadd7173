"""Copy a local folder into a store."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardio.storage import Location, RemoteAccess, parse_location
from shardio.storage.remote.options import make_options


def upload(folder: Path, url: str, options: Mapping[str, str] | None = None) -> Location:
    """Write each file of a folder to a store. Return the location of the copies."""
    target = parse_location(url, RemoteAccess(options=make_options(options)))
    for path in sorted(folder.iterdir()):
        if not path.name.startswith("."):
            with (target / path.name).write_whole() as file:
                file.write(path.read_bytes())
    return target
