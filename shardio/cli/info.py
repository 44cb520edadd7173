"""``shardio info``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardio.cli.console import count, format_bytes
from shardio.cli.forecast import DecoderForecast, forecast_decoders
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo, printable
from shardio.errors import ShardioError

if TYPE_CHECKING:
    from shardio.shards import ShardTable

SHOWN = 8
"""The maximum number of class names to print."""


def info(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Show what a dataset contains, how it was packed, and which decoders its images need on this machine.

    The decoders are estimated from the headers of up to 1,000 evenly spaced images.
    libjpeg-turbo decodes every JPEG crop of more than a million pixels, and whole untiled JPEGs that are not resized.
    A loader's stats() counts the images that each decoder actually decoded.

    Example: shardio info packed/train
    """
    from shardio.shards import open_table

    table = open_table(source, read_access(storage_option))
    manifest, forecast = table.manifest, _try_forecast(table)
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
            "decoded": forecast.dump() if isinstance(forecast, DecoderForecast) else None,
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
        "shards": f"{len(manifest.shards)}, {_format_range(int(sizes.min()), int(sizes.max()))} each",
        "size": f"{format_bytes(manifest.num_bytes)}, {format_bytes(mean_size)} per sample",
        "fields": ", ".join(manifest.fields),
        "classes": f"{len(manifest.classes)}{': ' if names else ''}{names}",
        "tiled": "unknown" if tiled is None else f"{tiled} of {manifest.num_samples} samples",
        "decoders": forecast.describe() if isinstance(forecast, DecoderForecast) else f"unknown: {forecast}",
        **(
            {"clipped": forecast.describe_clipped()}
            if isinstance(forecast, DecoderForecast) and forecast.clipped
            else {}
        ),
        "packed": packed or "unknown: there is no manifest",
        "digest": manifest.digest,
    }
    for name, value in rows.items():
        echo(f"{name:<8} {printable(value)}")


def _format_range(smallest: int, largest: int) -> str:
    """Return a range of sample counts as text, such as ``5 samples`` or ``1 to 5 samples``."""
    return f"{'' if smallest == largest else f'{smallest} to '}{count(largest, 'sample')}"


def _try_forecast(table: ShardTable) -> DecoderForecast | Exception:
    """Return a forecast, or the error if the shards cannot be read. All other rows need only the manifest."""
    try:
        return forecast_decoders(table)
    except (ShardioError, OSError) as error:
        return error
