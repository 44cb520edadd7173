"""Dataset storage: locations, stores and local files."""

from shardio.storage.local import FolderFiles, find_path, make_version, read_and_stat, walk_files, walk_folders
from shardio.storage.locations import (
    RemoteAccess,
    StorageOptions,
    link_or_copy,
    make_access,
    make_direct_access,
    map_locations,
    parse_location,
)
from shardio.storage.store import (
    PIECE,
    FileStat,
    Location,
    ReplacedError,
    Store,
    StoredFile,
    Writer,
    absolute_path,
    find_url,
    make_path,
    read_as_utf8,
    read_pieces,
)

__all__ = [
    "PIECE",
    "FileStat",
    "FolderFiles",
    "Location",
    "RemoteAccess",
    "ReplacedError",
    "StorageOptions",
    "Store",
    "StoredFile",
    "Writer",
    "absolute_path",
    "find_path",
    "find_url",
    "link_or_copy",
    "make_access",
    "make_direct_access",
    "make_path",
    "make_version",
    "map_locations",
    "parse_location",
    "read_and_stat",
    "read_as_utf8",
    "read_pieces",
    "walk_files",
    "walk_folders",
]
