"""``shardio export-index``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.console import count, value_errors_as_usage_errors
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo, printable
from shardio.shards import ExportFormat


def export_index(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A packed directory, a manifest, a tar, or a directory of tars.")
    ],
    format: Annotated[  # noqa: A002  # The name of the option.
        ExportFormat,
        typer.Option(
            help="wids: wids.json, for WebDataset's wids. dali: a NAME.idx for each NAME.tar. timm: _info.json. "
            "energon: .nv-meta and NAME.tar.idx, for Megatron-Energon, in another directory. webdataset-sizes: "
            "sizes.json, for open_clip."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", show_default="that of the shards", help="The directory to write to.")
    ] = None,
    split: Annotated[str, typer.Option(help="The name of the split, for timm and energon.")] = "train",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the paths of the files as JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the index that another tool needs to read a dataset. The shards are unchanged.

    Megatron-Energon's index of a tar has the same name as shardio's, so it needs another directory, to which the tars
    are hard-linked, or copied if that is impossible.

    Example: shardio export-index out --format dali
    """
    from shardio import shards

    access = read_access(storage_option)
    with value_errors_as_usage_errors():
        written = shards.export_index(source, format, out, split=split, overwrite=overwrite, access=access)
    if as_json:
        echo(json.dumps({"files": [str(location) for location in written]}, indent=1))
    else:
        echo(f"wrote {count(len(written), 'file')} to {printable(written[0].folder if out is None else out)}")
