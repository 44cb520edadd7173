"""Packing: turn a directory of images, or the samples of a program, into tar shards."""

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
from shardio.packing.sizes import parse_size
from shardio.packing.sources.files import FileProblem
from shardio.packing.sources.layouts import Layout
from shardio.packing.sources.source import SourceOptions, make_options
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
    "PackProgress",
    "PackResult",
    "PackSettings",
    "Parts",
    "RejectedSample",
    "RunOptions",
    "ShardWriter",
    "SourceOptions",
    "append",
    "finalize",
    "make_options",
    "make_parts",
    "merge",
    "pack",
    "pack_parts",
    "pack_source",
    "parse_size",
    "reshard",
    "split",
]
