"""Run the command line, ``shardio COMMAND …``. Exit codes: 0 success, 1 failure, 2 usage error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

import shardio
from shardio.cli.terminal import echo, prepare_streams
from shardio.errors import ShardioError

PANELS = {
    "Make a dataset": {"pack": "pack", "index": "verify", "repair": "verify"},
    "Change a dataset": {
        "append": "change",
        "merge": "change",
        "split": "change",
        "reshard": "change",
        "export-index": "verify",
    },
    "Inspect a dataset": {
        "info": "look",
        "ls": "look",
        "cat": "look",
        "extract": "look",
        "view": "view",
        "dups": "verify",
    },
    "Check a dataset or a loader": {
        "verify": "verify",
        "check": "check",
        "order": "look",
        "mix": "mix",
        "doctor": "check",
    },
    "Transform and train": {"augment": "view", "bench": "check", "train": "train"},
    "Single JPEG files": {"tile": "change", "untile": "change"},
}
"""The commands in each panel of ``shardio --help``, each with the module of the function that runs it."""

PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


class Commands(Mapping[str, Any]):
    """The commands by name, for typer. A command's module is imported when the command is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _load_command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(PANEL_OF)

    def __len__(self) -> int:
        return len(PANEL_OF)


@cache
def _load_command(name: str) -> Any:
    """Import a command's module, and return typer's command. Unknown names raise KeyError."""
    panel, function_name = PANEL_OF[name], name.replace("-", "_")
    single = typer.Typer(add_completion=False)
    function = getattr(import_module(f"shardio.cli.{PANELS[panel][name]}"), function_name)
    single.command(name, rich_help_panel=panel)(function)
    return typer.main.get_command(single)


class CommandGroup(TyperGroup):
    """All commands. Running a command imports only its own module; ``--help`` imports the modules of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "commands": Commands()})


app = typer.Typer(
    cls=CommandGroup,
    help="Pack images into tar shards, and load them for training: each sample exactly once, in a reproducible order.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        echo(f"shardio {shardio.__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line, and report errors without a traceback."""
    prepare_streams()
    if "" in sys.argv[1:]:  # A Path would treat "" as the working directory.
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
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # The message of an error from a worker process starts with the worker's traceback.
    return str(error).rpartition(f"{type(error).__module__}.{type(error).__qualname__}: ")[2].strip()
