"""``shardio info``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardio.cli.console import count, format_bytes
from shardio.cli.forecast import Forecast, foresee
from shardio.cli.terminal import echo, printable
from shardio.errors import ShardioError

if TYPE_CHECKING:
    from shardio.shards import ShardTable

SHOWN = 8
"""How many class names are printed."""


def info(
    source: Annotated[Path, typer.Argument(help="A packed directory, a manifest, or a directory of tars.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what a dataset holds, how it was packed, and who will decode its images on this machine.

    That is estimated from the headers of up to 1,000 evenly spaced images. Crops that are resized to half their
    size or less are left to libjpeg-turbo, whatever their files are; a loader's stats() count what happened.
    """
    from shardio.shards import open_table

    table = open_table(source)
    manifest, forecast = table.manifest, _try_foresee(table)
    sizes = manifest.shard_sizes
    tiled = manifest.pack.get("num_tiled")
    if as_json:
        values = {
            "samples": manifest.num_samples,
            "shards": len(manifest.shards),
            "classes": list(manifest.classes),
            "fields": list(manifest.fields),
            "bytes": manifest.num_bytes,
            "samples_per_shard": {"min": int(sizes.min()), "mean": float(sizes.mean()), "max": int(sizes.max())},
            "digest": manifest.digest,
            "tiled": tiled,
            "decoded": forecast.dump() if isinstance(forecast, Forecast) else None,
            "format": manifest.format,
            "pack": manifest.pack,
        }
        echo(json.dumps(values, indent=1))
        return
    mean_size = manifest.num_bytes / manifest.num_samples
    names = ", ".join(manifest.classes[:SHOWN]) + (", …" if len(manifest.classes) > SHOWN else "")
    packed = ", ".join(
        f"{name} {value}" for name, value in manifest.pack.items() if value is not None and name != "num_tiled"
    )
    rows = {
        "samples": f"{manifest.num_samples}",
        "shards": f"{len(manifest.shards)}, of {sizes.min()} to {count(int(sizes.max()), 'sample')}",
        "size": f"{format_bytes(manifest.num_bytes)}, {format_bytes(mean_size)} a sample",
        "fields": ", ".join(manifest.fields),
        "classes": f"{len(manifest.classes)}{': ' if names else ''}{names}",
        "tiled": "unknown" if tiled is None else f"{tiled} of {manifest.num_samples} samples",
        "decoded": forecast.describe() if isinstance(forecast, Forecast) else f"unknown: {forecast}",
        "packed": packed or "unknown, there is no manifest",
        "digest": manifest.digest,
    }
    for name, value in rows.items():
        echo(f"{name:<8} {printable(value)}")


def _try_foresee(table: ShardTable) -> Forecast | Exception:
    """Return a forecast, or what is in its way: a manifest tells the rest without its shards."""
    try:
        return foresee(table)
    except (ShardioError, OSError) as error:
        return error
