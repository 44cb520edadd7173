"""Bytes from anywhere, and bytes safely put down."""

from shardio.storage.local import (
    PARTIAL_SUFFIX,
    LocalFile,
    ReplacedError,
    absolute_path,
    make_path,
    naming,
    read_as_utf8,
    walk_files,
    write_whole,
)
from shardio.storage.runs import read_pieces
from shardio.storage.urls import find_url

__all__ = [
    "PARTIAL_SUFFIX",
    "LocalFile",
    "ReplacedError",
    "absolute_path",
    "find_url",
    "make_path",
    "naming",
    "read_as_utf8",
    "read_pieces",
    "walk_files",
    "write_whole",
]
