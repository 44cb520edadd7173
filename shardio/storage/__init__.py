"""Bytes from anywhere, and bytes safely put down."""

from shardio.storage.local import PARTIAL_SUFFIX, LocalFile, walk_files, write_whole
from shardio.storage.runs import read_pieces

__all__ = ["PARTIAL_SUFFIX", "LocalFile", "read_pieces", "walk_files", "write_whole"]
