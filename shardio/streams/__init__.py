"""Shards that are read as streams: the output of commands, and what WebDataset opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.streams.shard_stream import ShardStream, StreamPlace
    from shardio.streams.sources import StreamNames, StreamSource, find_streams

__all__ = ["ShardStream", "StreamNames", "StreamPlace", "StreamSource", "find_streams"]

__getattr__ = import_on_use(
    __name__, {".shard_stream": "ShardStream StreamPlace", ".sources": "StreamNames StreamSource find_streams"}
)
