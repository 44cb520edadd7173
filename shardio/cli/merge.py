"""``shardio merge``."""

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


def merge(
    out: OutArgument,
    sources: Annotated[
        list[Path], typer.Argument(metavar="SOURCE…", help="Packed directories, tars, or directories of tars.")
    ],
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    max_shard_samples: MaxShardSamples = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the samples of several datasets, one after another, to a new dataset.

    Samples are copied byte for byte, and compared with the hashes in their indexes. Keys must differ, and labels must
    have the same class names.

    Example: shardio merge all part-1 part-2 --max-shard-size 1GB
    """
    from shardio import packing

    with reporting(as_json=as_json) as progress:
        manifest = packing.merge(
            out,
            sources,
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            overwrite=overwrite,
            progress=progress,
            storage_options=read_options(storage_option),
        )
    print_datasets({out: manifest}, as_json=as_json)
