"""Run the command line, ``shardio COMMAND …``. Exit codes: 0 success, 1 failure, 2 usage error."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import shardio
from shardio.cli.terminal import echo, prepare_streams, print_error, styled
from shardio.errors import ShardioError

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

PANELS = {
    "Make a dataset": {
        "pack": ("pack", "Pack images, or another tool's dataset, into tar shards"),
        "index": ("verify", "Index tars that other tools packed"),
        "repair": ("verify", "Rebuild the manifest and indexes from the tars"),
    },
    "Change a dataset": {
        "append": ("change", "Add samples to a packed dataset"),
        "merge": ("change", "Join several datasets into a new one"),
        "split": ("change", "Split a dataset into new ones, such as train and val"),
        "reshard": ("change", "Copy a dataset with a new shard size or sample order"),
        "export-index": ("verify", "Write the index that another tool needs"),
    },
    "Inspect a dataset": {
        "info": ("look", "Show what a dataset contains and how it was packed"),
        "ls": ("look", "List the keys of the samples"),
        "cat": ("look", "Print one field of a sample"),
        "extract": ("look", "Write samples to files"),
        "view": ("view", "Show images, classes and sizes on one page"),
        "dups": ("verify", "Find images that occur several times"),
    },
    "Check a dataset or a loader": {
        "verify": ("verify", "Compare the manifest, the indexes and the tars"),
        "check": ("check", "Report which samples a loader repeats or loses"),
        "order": ("look", "Measure how well an epoch is shuffled"),
        "mix": ("check", "Describe a mixture of datasets"),
        "doctor": ("measure", "Find out whether loading holds training back"),
    },
    "Transform and train": {
        "augment": ("view", "Show what a recipe or a transform does to images"),
        "bench": ("measure", "Measure the speed and find the bottleneck of loading"),
        "train": ("train", "Train a classifier"),
    },
    "Single JPEG files": {
        "tile": ("change", "Make crops of JPEG files decode faster"),
        "untile": ("change", "Undo tile"),
    },
    "Help": {"help": ("main", "Show the options of a command")},
}
"""The commands in each panel of ``shardio --help``, each with the module of its function and a summary."""

NO_BREAK = "\u2011"
"""The character that stands for a hyphen while text is wrapped."""

Row = tuple[str, str]
"""A name and its description."""

MODULES = {name: module for commands in PANELS.values() for name, (module, _) in commands.items()}


def find_url(*labels: str) -> str | None:
    """Return the project's URL with the first of these labels that exists: see ``[project.urls]`` in pyproject.toml."""
    from importlib.metadata import PackageNotFoundError, metadata  # Only help and internal errors need this import.

    try:
        lines = metadata("shardio-loader").get_all("Project-URL") or []
    except PackageNotFoundError:
        return None
    urls = dict(line.split(", ", 1) for line in lines)
    return next((urls[label] for label in labels if label in urls), None)


def _write_help(
    command: TyperCommand | TyperGroup, context: Context, formatter: HelpFormatter, rows: Iterable[tuple[str, Row]] = ()
) -> None:
    """Write a command's help: its usage, its text, its panels as plain sections, and a link to the documentation.

    Args:
        command: The command.
        context: The command's context.
        formatter: The formatter that receives the help.
        rows: The rows before those of the parameters, each with the heading of its section.
    """
    command.format_usage(context, formatter)
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(_keep_hyphens(cleandoc(command.help or "")))
    sections = defaultdict[str, list[Row]](list)
    for heading, row in (*rows, *_list_parameters(command, context)):
        sections[heading].append(row)
    sections["Options"] = sections.pop("Options")  # They come last.
    for heading, section in sections.items():
        with formatter.section(styled(heading, bold=True)):
            formatter.write_dl(section)
    if url := find_url("Documentation", "Repository"):
        formatter.write(f"\nDocumentation: {url}\n")
    formatter.buffer = ["".join(formatter.buffer).replace(NO_BREAK, "-")]


def _list_parameters(command: TyperCommand | TyperGroup, context: Context) -> Iterator[tuple[str, Row]]:
    """Yield the panel, the name and the description of each parameter."""
    for parameter in command.get_params(context):
        is_argument = parameter.param_type_name == "argument"
        panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
        if record := parameter.get_help_record(context):
            name, text = record
            name = name.split()[0] if is_argument else name.replace(" range>", ">")
            yield panel, (name, _keep_hyphens(text.replace(f"0<=x<={2**63 - 1}", "x>=0")))


def _keep_hyphens(text: str) -> str:
    """Return text in which lines are not broken after hyphens, such as the one in ``--max-side``."""
    return text.replace("-", NO_BREAK)


class Command(TyperCommand):
    """A command that shows its help as plain text."""

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        _write_help(self, ctx, formatter)


class LazyCommand(TyperCommand):
    """A command whose module is imported when it runs. ``shardio --help`` does not import the commands' modules."""

    def make_context(self, info_name: str | None, args: list[str], parent: Context | None = None, **extra: Any) -> Any:
        return load_command(str(self.name)).make_context(info_name, args, parent, **extra)


@cache
def load_command(name: str) -> Command:
    """Import a command's module, and return typer's command."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    function = getattr(import_module(f"shardio.cli.{MODULES[name]}"), name.replace("-", "_"))
    single.command(name, cls=Command)(function)
    return typer.main.get_command(single)  # type: ignore[return-value]  # This is an instance of `cls`.


class CommandGroup(TyperGroup):
    """All commands. Running a command imports only its own module."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: LazyCommand(name, short_help=summary, rich_help_panel=panel)
            for panel, commands in PANELS.items()
            for name, (_, summary) in commands.items()
        }

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        width = max(map(len, self.commands))
        rows = [
            (getattr(command, "rich_help_panel", ""), (name.ljust(width), command.get_short_help_str()))
            for name, command in self.commands.items()
        ]
        _write_help(self, ctx, formatter, rows)

    def main(self, *arguments: Any, **settings: Any) -> Any:
        """Run a command. Usage errors end the process with code 2."""
        try:
            code = super().main(*arguments, **{**settings, "prog_name": "shardio", "standalone_mode": False}) or 0
        except typer.TyperException as error:
            print_error(*_describe_usage_error(error))
            code = error.exit_code
        sys.exit(code)


def _describe_usage_error(error: typer.TyperException) -> tuple[str, str]:
    """Return what is wrong, and a hint."""
    what, _, near = error.format_message().partition(" Did you mean ")
    if options := getattr(error, "possibilities", None):
        what, near = error.message, f"{', '.join(map(repr, sorted(options)))}?"
    if what.startswith("Invalid value: "):
        what = what.removeprefix("Invalid value: ")  # shardio's own message, which may start with a name.
    else:
        what = what[:1].lower() + re.sub(r"\n\t", " ", what[1:]).removesuffix(".").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    if near or context is None:
        return what, near and f"did you mean {near}"
    return what, f"see {context.command_path} --help"


app = typer.Typer(
    cls=CommandGroup,
    help="Pack images into tar shards, and load them for training: each sample exactly once, in a reproducible order.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
) -> None:
    if version:
        echo(f"shardio {shardio.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


def help(  # noqa: A001  # It names the command.
    command: Annotated[
        str | None,
        typer.Argument(
            metavar="COMMAND", autocompletion=lambda: list(MODULES), help="A command; omit it to list all commands."
        ),
    ] = None,
) -> None:
    """Show the options of a command, like shardio COMMAND --help.

    Example: shardio help pack
    """
    app([*([] if command is None else [command]), "--help"])


def main() -> None:
    """Run the command line, and report errors. Only an internal error has a traceback."""
    prepare_streams()
    if "" in sys.argv[1:]:  # A Path would treat "" as the working directory.
        print_error("an argument is empty", "check that the shell variables in the command are set")
        sys.exit(2)
    try:
        app()
    except (ShardioError, OSError, ImportError) as error:
        print_error(_describe(error))
    except MemoryError as error:
        what = f" ({error})" if str(error) else ""
        print_error(f"not enough memory{what}", "use smaller images or batches")
    except Exception:  # This is a bug, so its traceback is shown.
        traceback.print_exc()
        where = find_url("Issues", "Repository")
        print_error("shardio failed unexpectedly", f"report the traceback{f' at {where}' if where else ''}")
    sys.exit(1)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:  # Omit the error's number.
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # The message of an error from a worker process starts with the worker's traceback.
    return str(error).rpartition(f"{type(error).__module__}.{type(error).__qualname__}: ")[2].strip()
