"""The command line: ``shardio COMMAND …``. Exit codes: 0 success, 1 failure, 2 usage error."""

from __future__ import annotations

import os
import sys

import typer

import shardio
from shardio.cli.append import append
from shardio.cli.augment import augment
from shardio.cli.bench import bench
from shardio.cli.cat import cat
from shardio.cli.check import check
from shardio.cli.dups import dups
from shardio.cli.export_index import export_index
from shardio.cli.extract import extract
from shardio.cli.index import index
from shardio.cli.info import info
from shardio.cli.ls import ls
from shardio.cli.merge import merge
from shardio.cli.order import order
from shardio.cli.pack import pack
from shardio.cli.repair import repair
from shardio.cli.reshard import reshard
from shardio.cli.split import split
from shardio.cli.terminal import echo, prepare_streams
from shardio.cli.tile import tile, untile
from shardio.cli.train import train
from shardio.cli.verify import verify
from shardio.cli.view import view
from shardio.errors import ShardioError

app = typer.Typer(
    help="Pack images into tar shards, and load them for training: each sample exactly once, in a reproducible order.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
PANELS = {
    "Make a dataset": (pack, index, repair),
    "Change a dataset": (append, merge, split, reshard, export_index),
    "Look into a dataset": (info, ls, cat, extract, view, dups),
    "Check a dataset or a loader": (verify, check, order),
    "Transform and train": (augment, bench, train),
    "Single JPEG files": (tile, untile),
}
"""The commands by the panel of ``shardio --help`` that lists them."""

for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        echo(f"shardio {shardio.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; report errors without a traceback."""
    prepare_streams()
    if "" in sys.argv[1:]:  # As a Path, it would mean the working directory.
        echo("error: an argument is empty: check that the shell variables in the command are set", err=True)
        sys.exit(2)
    try:
        app()
    except (ShardioError, OSError) as error:
        echo(f"error: {_describe(error)}", err=True)
        sys.exit(1)
    except MemoryError as error:
        what = f" ({error})" if str(error) else ""
        echo(f"error: not enough memory{what}: use smaller images or batches", err=True)
        sys.exit(1)


def _describe(error: ShardioError | OSError) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:  # Without the error's number.
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    # The message of an error from a worker process starts with the worker's traceback.
    return str(error).rpartition(f"{type(error).__module__}.{type(error).__qualname__}: ")[2].strip()
