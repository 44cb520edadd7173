"""``shardio cat``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.samples import open_samples, read_sample
from shardio.cli.storage_options import StorageOptionTexts, read_options
from shardio.cli.terminal import echo


def cat(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A packed directory, a manifest, a tar, a directory of tars, or an indexed .tar.gz."
        ),
    ],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key of a sample, as shardio ls prints it.")],
    field: Annotated[
        str | None, typer.Option(metavar="FIELD", help="The field to write. May be omitted if there is only one.")
    ] = None,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Write the bytes of one field of a sample to standard output.

    Example: shardio cat out cats/0001 --field jpg > 0001.jpg
    """
    with open_samples(source, read_options(storage_option)) as samples:
        fields = read_sample(samples, key)
    if field is None and len(fields) == 1:
        (field,) = fields
    if field not in fields:
        what = "has several fields" if field is None else f"has no field {field!r}"
        echo(f"error: sample {key} {what}: choose one with --field: {', '.join(fields) or '(none)'}", err=True)
        raise typer.Exit(1)
    typer.echo(fields[field], nl=False)
