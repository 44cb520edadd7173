"""Options and output that merge, split, reshard and append share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardio.cli.console import count, format_bytes, name_of, value_errors_as_usage_errors
from shardio.cli.progress import ProgressReporter
from shardio.cli.terminal import echo
from shardio.packing import PackProgress

if TYPE_CHECKING:
    from shardio.shards import Manifest

MaxShardSamples = Annotated[int | None, typer.Option(min=1, help="Maximum number of samples in a shard.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a dataset in the new directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")]
OutArgument = Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty directory, or a URL.")]


@contextmanager
def reporting(*, as_json: bool, doing: str = "copying") -> Iterator[PackProgress]:
    """Report progress on standard error unless ``as_json``, and turn wrong settings into usage errors."""
    reporter = nullcontext(PackProgress()) if as_json else ProgressReporter(doing)
    with value_errors_as_usage_errors(), reporter as progress:
        yield progress


def print_datasets(datasets: Mapping[Path, Manifest], *, as_json: bool) -> None:
    """Print what was written to each directory."""
    if as_json:
        values = [summarise(out, manifest) for out, manifest in datasets.items()]
        echo(json.dumps(values[0] if len(values) == 1 else values, indent=1))
        return
    for out, manifest in datasets.items():
        size = f"{count(len(manifest.shards), 'shard')}, {format_bytes(manifest.num_bytes)}"
        echo(f"{name_of(out)}: {count(manifest.num_samples, 'sample')} in {size}")


def summarise(out: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the summary of a dataset as a JSON object."""
    return {
        "out": name_of(out),
        "samples": manifest.num_samples,
        "shards": len(manifest.shards),
        "bytes": manifest.num_bytes,
        "fields": list(manifest.fields),
        "classes": len(manifest.classes),
        "digest": manifest.digest,
    }
