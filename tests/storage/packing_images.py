"""Pack a directory of images into small shards."""

from __future__ import annotations

from pathlib import Path

import shardio


def pack_images(source: Path, target: Path, max_shard_samples: int = 5) -> None:
    """Pack a directory of class folders."""
    shardio.pack(source, target, max_shard_samples=max_shard_samples)
