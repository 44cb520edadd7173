"""Bytes from anywhere, and bytes safely put down."""

from shardio.storage.local import PARTIAL_SUFFIX, LocalFile, walk_files, write_whole

__all__ = ["PARTIAL_SUFFIX", "LocalFile", "walk_files", "write_whole"]
