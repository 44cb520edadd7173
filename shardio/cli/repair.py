"""``shardio repair``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.class_names import read_classes
from shardio.cli.console import count, format_bytes, name_of, value_errors_as_usage_errors
from shardio.cli.storage_options import StorageOptionTexts, read_access
from shardio.cli.terminal import echo, printable
from shardio.whole_writes import remove_unfinished

SHOWN = 20
"""The maximum number of keys to print for each tar, and of problems."""


def repair(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A packed directory.")],
    classes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DATASET",
            help="The class names, if the manifest that had them is lost: a text file with one name per line, a packed "
            "directory, or class folders.",
        ),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Trust tars whose contents changed since they were packed. By default, they are reported as damaged.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    storage_option: StorageOptionTexts = None,
) -> None:
    """Rebuild missing, stale and damaged indexes and the manifest of a packed dataset from its tars.

    If a tar is truncated, a new tar with its complete samples replaces it, and the dropped keys are printed.
    Other tars are never changed. Rerun the command if it is interrupted, and run shardio verify afterwards.
    The exit code is 1 if a problem remains, such as a tar that cannot be read.

    Example: shardio repair out --classes classes.txt
    """
    from shardio.shards import MANIFEST_NAME
    from shardio.shards.repairing import repair as repair_folder
    from shardio.storage import find_path, parse_location

    access = read_access(storage_option)
    with value_errors_as_usage_errors():
        names = None if classes is None else read_classes(classes, access)
    folder = parse_location(out, access)
    result = repair_folder(folder, classes=names, accept_changes=accept_changes)
    if result.manifest is not None and find_path(folder) is not None:
        names_of_tars = [shard.name for shard in result.manifest.shards]
        targets = {MANIFEST_NAME, *names_of_tars, *(name + ".idx" for name in names_of_tars)}
        remove_unfinished(out, targets)  # An earlier repair may have been killed.
    if as_json:
        values = {
            "actions": [action.dump() for action in result.actions],
            "problems": [problem.dump() for problem in result.problems],
            "classes_lost": result.are_classes_lost,
        }
        echo(json.dumps(values, indent=1))
    else:
        for action in result.actions:
            echo(printable(f"{action.where}: {action.message}"))
            for key in action.dropped[:SHOWN]:
                echo(printable(f"  dropped sample {key}"))
            if len(action.dropped) > SHOWN:
                echo(f"  and {len(action.dropped) - SHOWN} more samples (--json prints all)")
        for problem in result.problems[:SHOWN]:
            echo(f"{problem.kind}: {printable(problem)}", err=True)
        if len(result.problems) > SHOWN:
            echo(f"and {len(result.problems) - SHOWN} more problems (--json prints all)", err=True)
        if (manifest := result.manifest) is not None:
            size = f"{count(len(manifest.shards), 'shard')}, {count(manifest.num_samples, 'sample')}"
            done = count(len(result.actions), "file") + " written" if result.actions else "nothing to repair"
            echo(f"{done}: {size}, {format_bytes(manifest.num_bytes)}")
    if result.are_classes_lost:
        echo(
            "warning: the class names were in the lost manifest. To give them again: shardio repair "
            f"{name_of(out)} --classes FILE (one name per line, by label), or --classes DATASET",
            err=True,
        )
    if result.problems:
        raise typer.Exit(1)
