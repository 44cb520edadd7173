"""``shardio info``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.console import count, format_bytes

SHOWN = 8
"""How many class names are printed."""


def info(
    source: Annotated[Path, typer.Argument(help="A packed directory, a manifest, or a directory of tars.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what a dataset holds and how it was packed."""
    from shardio.shards import open_table

    manifest = open_table(source).manifest
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
            "format": manifest.format,
            "pack": manifest.pack,
        }
        typer.echo(json.dumps(values, indent=1))
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
        "packed": packed or "unknown, there is no manifest",
        "digest": manifest.digest,
    }
    for name, value in rows.items():
        typer.echo(f"{name:<8} {value}")
