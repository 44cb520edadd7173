"""``shardio reshard``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.rewriting import (
    AsJson,
    MaxShardSamples,
    OutArgument,
    Overwrite,
    print_datasets,
    reporting,
)
from shardio.cli.sizes import MaxShardSize
from shardio.cli.storage_options import StorageOptionTexts, read_options
from shardio.packing import DEFAULT_SHARD_SIZE


def reshard(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
    ],
    out: OutArgument,
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    max_shard_samples: MaxShardSamples = None,
    shuffle_seed: Annotated[
        int | None, typer.Option(min=0, show_default="keep the order", help="Seed of a new order of all samples.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write a dataset to a new one with shards of another size, or in another order.

    Samples are copied byte for byte, and compared with the hashes in their indexes.

    Example: shardio reshard out small --max-shard-size 64MiB
    """
    from shardio import packing

    with reporting(as_json=as_json) as progress:
        manifest = packing.reshard(
            source,
            out,
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            shuffle_seed=shuffle_seed,
            overwrite=overwrite,
            progress=progress,
            storage_options=read_options(storage_option),
        )
    print_datasets({out: manifest}, as_json=as_json)
