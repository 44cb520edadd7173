"""Output that several commands share: progress, counts and sizes as text, and usage errors."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardio.cli.terminal import echo, printable
from shardio.looking import format_bytes as format_bytes
from shardio.packing import PackProgress

LINE_EVERY_S = 5.0
"""Seconds between progress lines if standard error is not a terminal."""


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


def count(num_things: int, noun: str, plural: str | None = None) -> str:
    """Return a count as text, such as ``1 shard`` or ``2 shards``."""
    return f"{num_things} {noun if num_things == 1 else plural or noun + 's'}"


def format_counts(counts: Counter[str]) -> str:
    """Return counts as text, the largest first, such as ``2 × PNG, 1 × 4 components``."""
    return ", ".join(f"{num_things} × {thing}" for thing, num_things in counts.most_common())


def make_bar() -> Progress:
    """Return a progress bar on standard error, with a description, a rate and the remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class PackReporter(PackProgress):
    """Shows the progress of a pack: a bar on a terminal, otherwise a line every few seconds. A context manager.

    Args:
        doing: What is done with the samples.
        done: The same in the past.
    """

    def __init__(self, doing: str = "packing", done: str = "packed") -> None:
        self._doing, self._done = doing, done
        self._lock = threading.Lock()
        self._bar = make_bar() if sys.stderr.isatty() else None
        self._num_samples = self._total_samples = self._num_bytes = self._total_bytes = 0
        self._start = self._last_line = time.monotonic()

    def planned(self, num_samples: int, num_bytes: int) -> None:
        self._total_samples, self._total_bytes = num_samples, num_bytes
        self._start = self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._doing, total=num_samples, rate="")
        else:
            echo(f"{self._doing} {count(num_samples, 'sample')}, {format_bytes(num_bytes)}", err=True)

    def packed(self, num_samples: int, num_bytes: int) -> None:
        with self._lock:
            self._num_samples += num_samples
            self._num_bytes += num_bytes
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._num_samples, rate=self._rate(now))
            elif now - self._last_line >= LINE_EVERY_S:
                self._last_line = now
                left_s = (now - self._start) * (self._total_samples / self._num_samples - 1)
                echo(
                    f"{self._done} {self._num_samples} of {self._total_samples} samples, {self._rate(now)}, "
                    f"about {left_s:.0f} s left",
                    err=True,
                )

    def __enter__(self) -> PackReporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _rate(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        return f"{self._num_samples / seconds:.0f} samples/s, {format_bytes(self._num_bytes / seconds)}/s"
