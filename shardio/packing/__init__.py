"""Packing: turn a directory of images into tar shards."""

from shardio.packing.jpegs import DEFAULT_QUALITY, TILED, JpegTally
from shardio.packing.layouts import Layout
from shardio.packing.packer import DEFAULT_SHARD_SIZE, PackResult, pack, pack_directory
from shardio.packing.plan import JpegMode, PackSettings
from shardio.packing.shard_writer import OnChanged, PackProgress
from shardio.packing.sources import FileProblem

__all__ = [
    "DEFAULT_QUALITY",
    "DEFAULT_SHARD_SIZE",
    "TILED",
    "FileProblem",
    "JpegMode",
    "JpegTally",
    "Layout",
    "OnChanged",
    "PackProgress",
    "PackResult",
    "PackSettings",
    "pack",
    "pack_directory",
]
