"""Packing: turn a directory of images, or the samples of a program, into tar shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio.packing.appending import append
    from shardio.packing.executors import Engine
    from shardio.packing.jpegs import DEFAULT_QUALITY, TILED, JpegTally
    from shardio.packing.label_files import LabelFile, check_label_file
    from shardio.packing.layouts import Layout
    from shardio.packing.packed_shard import RejectedSample
    from shardio.packing.packer import DEFAULT_SHARD_SIZE, REJECTED_NAME, PackResult, pack, pack_directory
    from shardio.packing.plan import JpegMode, PackSettings
    from shardio.packing.progress import PackProgress
    from shardio.packing.rewriting import merge, reshard, split
    from shardio.packing.shard_job import OnChanged
    from shardio.packing.shard_writer import ShardWriter
    from shardio.packing.sizes import parse_size
    from shardio.packing.sources import FileProblem
    from shardio.packing.worker_parts import finalize

__all__ = [
    "DEFAULT_QUALITY",
    "DEFAULT_SHARD_SIZE",
    "REJECTED_NAME",
    "TILED",
    "Engine",
    "FileProblem",
    "JpegMode",
    "JpegTally",
    "LabelFile",
    "Layout",
    "OnChanged",
    "PackProgress",
    "PackResult",
    "PackSettings",
    "RejectedSample",
    "ShardWriter",
    "append",
    "check_label_file",
    "finalize",
    "merge",
    "pack",
    "pack_directory",
    "parse_size",
    "reshard",
    "split",
]

__getattr__ = import_on_use(
    __name__,
    {
        ".appending": "append",
        ".executors": "Engine",
        ".jpegs": "DEFAULT_QUALITY TILED JpegTally",
        ".label_files": "LabelFile check_label_file",
        ".layouts": "Layout",
        ".packed_shard": "RejectedSample",
        ".packer": "DEFAULT_SHARD_SIZE REJECTED_NAME PackResult pack pack_directory",
        ".plan": "JpegMode PackSettings",
        ".progress": "PackProgress",
        ".rewriting": "merge reshard split",
        ".shard_job": "OnChanged",
        ".shard_writer": "ShardWriter",
        ".sizes": "parse_size",
        ".sources": "FileProblem",
        ".worker_parts": "finalize",
    },
)
