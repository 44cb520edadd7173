"""Options for sizes in bytes, which several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from shardio.values import parse_size


def parse_size_option(text: str | int) -> int:
    """Return the number of bytes in a size such as ``256MiB``; raise a usage error for anything else."""
    try:
        return parse_size("it", text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


MaxShardSize = Annotated[
    int,
    typer.Option(
        parser=parse_size_option,
        metavar="SIZE",
        show_default="256MiB",
        help="Maximum size of a shard, such as 256MiB or 1GB.",
    ),
]
