"""Output that several commands share: counts and sizes as text, and usage errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from shardio.cli.terminal import echo, printable
from shardio.looking import format_bytes as format_bytes
from shardio.storage import find_url


@contextmanager
def value_errors_as_usage_errors() -> Iterator[None]:
    """Turn a ValueError about a setting into a usage error with exit code 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(printable(error, keep="\n\t")) from error


def check_png_path(path: Path | None) -> Path | None:
    """Return the path of an image to write; raise a usage error unless it ends in .png."""
    if path is not None and path.suffix != ".png":
        raise typer.BadParameter(f"{str(path)!r} must end in .png")
    return path


def require_matplotlib() -> None:
    """Exit with code 1 if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401  # Only to check whether it is installed.
    except ImportError as error:
        echo("error: --plot needs matplotlib: pip install matplotlib", err=True)
        raise typer.Exit(1) from error


def name_of(path: Path) -> str:
    """Return a path or a URL as the user wrote it. A Path keeps only one of a URL's slashes."""
    return find_url(path) or str(path)


def count(num_things: int, noun: str, plural: str | None = None) -> str:
    """Return a count as text, such as ``1 shard`` or ``2 shards``."""
    return f"{num_things} {noun if num_things == 1 else plural or noun + 's'}"


def format_counts(counts: Counter[str]) -> str:
    """Return counts as text, the largest first, such as ``2 × PNG, 1 × 4 components``."""
    return ", ".join(f"{num_things} × {thing}" for thing, num_things in counts.most_common())
