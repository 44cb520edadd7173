"""Packing: turn a directory of images, or the samples of a program, into tar shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.packing.changes.appending import append
    from shardio.packing.changes.rewriting import merge, reshard, split
    from shardio.packing.executors.choosing import Engine
    from shardio.packing.jpegs import DEFAULT_QUALITY, TILED, JpegTally
    from shardio.packing.pack_call import DEFAULT_SHARD_SIZE, pack
    from shardio.packing.packed_shard import RejectedSample
    from shardio.packing.packer import RunOptions, pack_parts, pack_source
    from shardio.packing.parts import Parts, make_parts
    from shardio.packing.plan import JpegMode, PackSettings
    from shardio.packing.progress import PackProgress
    from shardio.packing.results import REJECTED_NAME, PackResult
    from shardio.packing.shard_job import OnChanged
    from shardio.packing.sources.files import FileProblem
    from shardio.packing.sources.layouts import Layout, OnIncomplete
    from shardio.packing.sources.source import SourceKind, SourceOptions, make_options
    from shardio.packing.writing.shard_writer import ShardWriter
    from shardio.packing.writing.worker_parts import finalize

__all__ = [
    "DEFAULT_QUALITY",
    "DEFAULT_SHARD_SIZE",
    "REJECTED_NAME",
    "TILED",
    "Engine",
    "FileProblem",
    "JpegMode",
    "JpegTally",
    "Layout",
    "OnChanged",
    "OnIncomplete",
    "PackProgress",
    "PackResult",
    "PackSettings",
    "Parts",
    "RejectedSample",
    "RunOptions",
    "ShardWriter",
    "SourceKind",
    "SourceOptions",
    "append",
    "finalize",
    "make_options",
    "make_parts",
    "merge",
    "pack",
    "pack_parts",
    "pack_source",
    "reshard",
    "split",
]

__getattr__ = import_on_use(
    __name__,
    {
        ".changes.appending": "append",
        ".changes.rewriting": "merge reshard split",
        ".executors.choosing": "Engine",
        ".jpegs": "DEFAULT_QUALITY TILED JpegTally",
        ".pack_call": "DEFAULT_SHARD_SIZE pack",
        ".packed_shard": "RejectedSample",
        ".packer": "RunOptions pack_parts pack_source",
        ".parts": "Parts make_parts",
        ".plan": "JpegMode PackSettings",
        ".progress": "PackProgress",
        ".results": "REJECTED_NAME PackResult",
        ".shard_job": "OnChanged",
        ".sources.files": "FileProblem",
        ".sources.layouts": "Layout OnIncomplete",
        ".sources.source": "SourceKind SourceOptions make_options",
        ".writing.shard_writer": "ShardWriter",
        ".writing.worker_parts": "finalize",
    },
)
