"""The command line: ``shardio COMMAND …``. Exit codes: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import sys

import typer

import shardio
from shardio.cli.bench import bench
from shardio.cli.check import check
from shardio.cli.info import info
from shardio.cli.order import order
from shardio.cli.pack import pack
from shardio.cli.terminal import echo, prepare_streams
from shardio.cli.tile import tile, untile
from shardio.cli.train import train
from shardio.errors import ShardioError

app = typer.Typer(
    help="Pack images into tar shards, and feed training from them: each sample exactly once, in a reproducible order.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (pack, info, order, check, bench, train, tile, untile):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        echo(f"shardio {shardio.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; say what went wrong in one line, without a traceback."""
    prepare_streams()
    if "" in sys.argv[1:]:  # A Path of it would be the working directory.
        echo("error: an argument is empty, perhaps because a variable of the shell is not set", err=True)
        sys.exit(2)
    try:
        app()
    except (ShardioError, OSError) as error:
        # An error that comes from a worker process says first where it was raised, as a traceback.
        message = str(error).rpartition(f"{type(error).__module__}.{type(error).__qualname__}: ")[2]
        echo(f"error: {message.strip()}", err=True)
        sys.exit(1)
    except MemoryError as error:
        echo(f"error: not enough memory: {error}: smaller images or batches need less", err=True)
        sys.exit(1)
