"""Dataset storage: locations, stores and local files."""

from shardio.storage.access import RemoteAccess, make_access, make_direct_access
from shardio.storage.linking import link_or_copy
from shardio.storage.local import FolderFiles, find_path, read_and_stat, walk_files, walk_folders
from shardio.storage.local_file import make_version
from shardio.storage.locations import parse_location
from shardio.storage.parallel import map_locations
from shardio.storage.paths import absolute_path, find_url, make_path, read_as_utf8
from shardio.storage.remote.options import StorageOptions
from shardio.storage.store import FileStat, Location, ReplacedError, Store, StoredFile, Writer
from shardio.storage.streaming import PIECE, read_pieces

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
