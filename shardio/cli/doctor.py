"""``shardio doctor``."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo

MAX_TARS = 8
"""The maximum number of tars to read from."""

NUMS_REQUESTS = (1, 2, 4, 8, 16, 32)
"""How many requests are made at a time, in turn."""


def doctor(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A packed dataset, above all one in an object store: s3://bucket/train."),
    ],
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Samples per second that your training needs on this machine.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Seconds to measure each number of requests.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Measure how fast the store of a dataset answers, and what that means for a loader.

    It reads parts of up to 8 shards for about 15 seconds; nothing is kept.

    Example: shardio doctor s3://bucket/train --rate 3000
    """
    from shardio.shards import open_table
    from shardio.storage.measuring import measure_store

    table = open_table(source, read_access(storage_option))
    tars = table.tars[:: -(-len(table.tars) // MAX_TARS)]
    with ExitStack() as stack:
        speed = measure_store([stack.enter_context(closing(tar.open())) for tar in tars], NUMS_REQUESTS, seconds)
    sample_size = table.manifest.num_bytes / table.manifest.num_samples
    possible = speed.best / sample_size
    if as_json:
        values = {
            "latency_s": speed.latency_s,
            "bytes_per_s": {str(number): found for number, found in speed.bytes_per_s.items()},
            "saturated_by": speed.num_saturating,
            "bytes_per_sample": sample_size,
            "samples_per_s": possible,
        }
        echo(json.dumps(values, indent=1))
        return
    echo(f"latency    {1000 * speed.latency_s:.1f} ms for one byte")
    for number, found in speed.bytes_per_s.items():
        echo(f"bandwidth  {found / 1e6:,.0f} MB/s with {number} request{'s' if number > 1 else ''} at a time")
    echo(f"saturated  by {speed.num_saturating} requests at a time; shardio reads ahead with 16")
    echo(f"samples    {possible:,.0f} samples/s of {sample_size / 1e3:,.1f} kB at most, in an epoch without a cache")
    if rate is not None:
        needed = rate * sample_size
        verdict = (
            "the store is fast enough" if needed <= speed.best else "the store is too slow: cache the data (cache=)"
        )
        echo(f"needed     {needed / 1e6:,.0f} MB/s for {rate:,.0f} samples/s: {verdict}")
