"""``shardio split``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.rewriting import AsJson, MaxShardSamples, Overwrite, print_datasets, reporting
from shardio.cli.sizes import MaxShardSize
from shardio.cli.storage_options import StorageOptionTexts, read_options
from shardio.packing import DEFAULT_SHARD_SIZE


def split(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory of the new datasets, or a URL.")],
    by: Annotated[str, typer.Option(metavar="FRACTIONS", help="The fraction of each part. They sum to 1.")] = "0.9,0.1",
    names: Annotated[
        str, typer.Option(metavar="NAMES", help="The name of each part: its directory in OUT.")
    ] = "train,val",
    max_shard_size: MaxShardSize = DEFAULT_SHARD_SIZE,
    max_shard_samples: MaxShardSamples = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Split a dataset into new datasets by a hash of each sample's key.

    The hash is xxh3-64 (seed 0) of the key in UTF-8. Divided by 2^64, it is compared with the running sums of the
    fractions, so a sample stays in its part when others are added to the dataset. The parts' sizes are about those
    fractions. Samples are copied byte for byte, and compared with the hashes in their indexes.

    Example: shardio split out parts --by 0.8,0.1,0.1 --names train,val,test
    """
    from shardio import packing

    with reporting(as_json=as_json) as progress:
        manifests = packing.split(
            source,
            out,
            by=by.split(","),
            names=names.split(","),
            max_shard_size=max_shard_size,
            max_shard_samples=max_shard_samples,
            overwrite=overwrite,
            progress=progress,
            storage_options=read_options(storage_option),
        )
    print_datasets({out / name: manifest for name, manifest in manifests.items()}, as_json=as_json)
