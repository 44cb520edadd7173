"""From a directory of images to shards."""

from shardio.packing.packer import DEFAULT_SHARD_SIZE, PackProgress, PackResult, pack, pack_directory
from shardio.packing.plan import PackSettings
from shardio.packing.scan import Problem

__all__ = ["DEFAULT_SHARD_SIZE", "PackProgress", "PackResult", "PackSettings", "Problem", "pack", "pack_directory"]
