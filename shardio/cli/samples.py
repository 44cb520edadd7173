"""Find samples by their keys, for the commands that list and extract them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardio.cli.terminal import echo

if TYPE_CHECKING:
    from shardio.reading.keyed import KeyedShards
    from shardio.shards import CompressedShard, IndexColumns
    from shardio.storage import Location, RemoteAccess, StorageOptions


@contextmanager
def open_samples(source: Path, storage_options: StorageOptions) -> Iterator[KeyedShards | CompressedShard]:
    """Open a dataset, or a compressed tar that has an index, to read samples by key."""
    from shardio.reading.keyed import open as open_keyed
    from shardio.shards import CompressedShard, is_compressed
    from shardio.storage import make_direct_access, parse_location

    location = parse_location(source, make_direct_access(storage_options))
    if is_compressed(location) and location.exists():
        with CompressedShard(location) as shard:
            yield shard
    else:
        with open_keyed(source, storage_options=storage_options) as samples:
            yield samples


def read_indexes(source: Path, access: RemoteAccess) -> Iterator[tuple[Location, IndexColumns]]:
    """Yield the tar and the index of each shard of a dataset, or those of a compressed tar that has an index."""
    from shardio.shards import CompressedShard, is_compressed, open_table, read_columns
    from shardio.storage import parse_location

    location = parse_location(source, access)
    if is_compressed(location) and location.exists():
        with CompressedShard(location) as shard:
            yield location, shard.columns
    else:
        table = open_table(source, access)
        for tar, index in zip(table.tars, table.indexes, strict=True):
            yield tar, read_columns(index)


def read_sample(samples: KeyedShards | CompressedShard, key: str) -> dict[str, Any]:
    """Return the fields of a sample by name. If no sample has the key, exit with code 1."""
    try:
        found = samples.read(key)
    except KeyError as error:
        echo(f"error: {error.args[0]}: shardio ls lists the keys", err=True)
        raise typer.Exit(1) from error
    return {field: content for field, content in found.items() if field != "__key__"}
