"""What a reader needs to know of a dataset."""

from __future__ import annotations

from dataclasses import dataclass

from shardio.shards.manifest import Manifest
from shardio.storage import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """A dataset's manifest and the locations of its files: everything that a reader needs.

    Attributes:
        manifest: The contents of the dataset.
        tars: The location of each shard, in manifest order.
        indexes: The location of each shard's index, in manifest order.
    """

    manifest: Manifest
    tars: tuple[Location, ...]
    indexes: tuple[Location, ...]
