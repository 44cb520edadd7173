"""Choose how to write to a folder."""

from __future__ import annotations

from shardio.packing.folders.folder import DatasetFolder
from shardio.packing.folders.local import LocalFolder
from shardio.packing.folders.remote import RemoteFolder
from shardio.storage import Location, find_path


def choose_folder(location: Location) -> DatasetFolder:
    """Return the folder at a location."""
    return RemoteFolder(location) if find_path(location) is None else LocalFolder(location)
