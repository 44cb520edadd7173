"""Options and work that tile and untile share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shardio.cli.console import count, format_bytes
from shardio.cli.terminal import echo, printable
from shardio.packing.jpegs import require_compiled_functions

Files = Annotated[list[Path], typer.Argument(metavar="FILES", help="JPEG files.", exists=True, dir_okay=False)]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Directory to write the files to, under the same names. Existing files are overwritten, so the directory "
        "of the originals is refused. Leave unset to write nothing.",
        file_okay=False,
    ),
]


def rewrite_all(files: list[Path], out: Path | None, rewrite: Callable[[bytes], bytes]) -> None:
    """Rewrite JPEG files, and report what changed. Files that cannot be rewritten are reported, too.

    Args:
        files: The files.
        out: Where to write the results; None to write nothing.
        rewrite: Returns a JPEG's new bytes. A ValueError says why it cannot.
    """
    require_compiled_functions()
    names = [file.name for file in files]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if out is not None and duplicate is not None:
        raise typer.BadParameter(
            f"two files are named {duplicate}: use a separate run and directory for each", param_hint="--out"
        )
    if out is not None:
        for file in files:
            _refuse_original(file, out / file.name)
        out.mkdir(parents=True, exist_ok=True)
    num_failed = sum(not _rewrite(file, out, rewrite) for file in files)
    if out is None:
        echo("nothing was written: pass --out DIRECTORY to write the files", err=True)
    if num_failed:
        raise typer.Exit(1)


def _refuse_original(file: Path, target: Path) -> None:
    if target.exists() and target.samefile(file):
        raise typer.BadParameter(
            f"{printable(file)} is in that directory and would be overwritten: choose another directory",
            param_hint="--out",
        )


def _rewrite(file: Path, out: Path | None, rewrite: Callable[[bytes], bytes]) -> bool:
    """Rewrite one file and report the result; return whether it could be rewritten."""
    from shardio.images.formats import find_format
    from shardio.whole_writes import write_whole

    before = file.read_bytes()
    try:
        after = rewrite(before)
    except ValueError as error:
        reason = error if find_format(before) == "JPEG" else "not a JPEG"
        echo(f"{file}: not rewritten: {reason}", err=True)
        return False
    if out is not None:
        with write_whole(out / file.name) as target:
            target.write(after)
    change = len(after) / len(before) - 1
    echo(
        f"{file}: {_describe(before)} → {_describe(after)}, {format_bytes(len(before))} → {format_bytes(len(after))} "
        f"({change:+.1%})"
    )
    return True


def _describe(content: bytes) -> str:
    """Return a JPEG's size and how it is divided: ``500×375, 192 tiles of 4 MCUs``."""
    from shardio.images.jpeg.head import read_head
    from shardio.images.jpeg.tile_table import read_tiles

    head = read_head(content)
    tiles = read_tiles(content, head)
    if tiles is not None:
        return f"{head.width}×{head.height}, {count(tiles.starts.size, 'tile')} of {count(tiles.interval, 'MCU')}"
    restarts = (
        f"restart markers every {count(head.restart_interval, 'MCU')}"
        if head.restart_interval
        else "no restart markers"
    )
    return f"{head.width}×{head.height}, {restarts}"
