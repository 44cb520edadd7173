"""``shardio append``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.console import count, name_of
from shardio.cli.rewriting import AsJson, reporting, summarise
from shardio.cli.storage_options import StorageOptionTexts, read_options
from shardio.cli.terminal import echo
from shardio.packing import Layout, SourceKind


def append(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A packed directory.")],
    more: Annotated[list[Path], typer.Argument(metavar="MORE…", help="Packed directories, or directories of images.")],
    copy: Annotated[
        bool, typer.Option("--copy", help="Copy shards. By default, they are hard-linked where possible.")
    ] = False,
    source_kind: Annotated[
        SourceKind, typer.Option(help="What each of MORE is, unless it is a packed directory, as for shardio pack.")
    ] = "auto",
    layout: Annotated[Layout, typer.Option(help="Layout of directories of images, as for shardio pack.")] = "auto",
    num_workers: Annotated[
        int | None, typer.Option("--num-workers", "--workers", min=1, help="Worker processes that pack images.")
    ] = None,
    as_json: AsJson = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Add the samples of other packed datasets, or of directories of images, to a packed dataset.

    Images are packed with the settings and the class names of OUT. OUT changes by one rename at the end: programs that
    have opened it before keep reading the samples it had. Rerun the same command if it is interrupted.

    Example: shardio append out new-images
    """
    from shardio import packing
    from shardio.shards import open_table

    num_before = open_table(out).manifest.num_samples
    with reporting(as_json=as_json, doing="packing") as progress:
        manifest = packing.append(
            out,
            more,
            copy=copy,
            source_kind=source_kind,
            layout=layout,
            num_workers=num_workers,
            progress=progress,
            storage_options=read_options(storage_option),
        )
    num_added = manifest.num_samples - num_before
    if as_json:
        echo(json.dumps({**summarise(out, manifest), "added": num_added}, indent=1))
    else:
        now = f"{count(manifest.num_samples, 'sample')} in {count(len(manifest.shards), 'shard')}"
        echo(f"{name_of(out)}: added {count(num_added, 'sample')}; now {now}")
