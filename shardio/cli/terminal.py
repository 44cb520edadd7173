"""Write counts, sizes, errors and progress to the terminal."""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardio.process import WorkProgress, ignore_pillows_warnings
from shardio.values import count, format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as ProgressBar


LINE_EVERY_S = 5.0
"""The time in seconds between progress lines if standard error is not a terminal."""

# Control characters (C0, DEL and C1), and characters that change the direction of text (Unicode, UAX #9).
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

_PACKAGE = Path(__file__).parents[1]

_format_warning = warnings.formatwarning


def printable(text: object, *, keep: str = "") -> str:
    r"""Return text with control characters escaped, except for those in ``keep``.

    File names, class names and keys may contain control characters. On a terminal, such characters could clear the
    screen, hide text, or type input.

    >>> printable("cats\x1b[2J")
    'cats\\x1b[2J'
    """

    def show(found: re.Match[str]) -> str:
        return found[0] if found[0] in keep else found[0].encode("unicode_escape").decode()

    return _UNPRINTABLE.sub(show, str(text))


def echo(text: str, *, err: bool = False) -> None:
    """Write lines to standard output, or to standard error."""
    typer.echo(printable(text, keep="\n\t"), err=err)


def styled(text: str, **style: Any) -> str:
    """Return text with a style, which :func:`typer.echo` removes unless it writes to a terminal."""
    return text if os.environ.get("NO_COLOR") else typer.style(text, **style)


def print_error(what: object, hint: str = "") -> None:
    """Write an error to standard error, with a hint on how to fix it."""
    for label, color, text in (("error", "red", what), ("hint", "cyan", hint)):
        if text:
            shown = printable(text, keep="\n\t")
            typer.echo(f"{styled(label, fg=color, bold=True)}: {shown}", err=True)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n\t")


def prepare_streams() -> None:
    """Make the standard streams accept any file name and escape control characters. Call this before a command runs."""
    _open_closed_streams()
    _take_any_name()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
    warnings.formatwarning = _format_printable_warning
    ignore_pillows_warnings()


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that are closed, for example by ``2>&-``.

    Otherwise, a file opened later would get the descriptor of a closed stream, and output to that stream would go to
    the file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # It must stay open.


def _take_any_name() -> None:
    """Make the standard streams accept any name: use UTF-8 instead of ASCII, and keep undecodable bytes."""
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):
            if codecs.lookup(stream.encoding).name in ("ascii", "utf-8"):
                stream.reconfigure(encoding="utf-8", errors="surrogateescape")
            else:
                stream.reconfigure(errors="backslashreplace")


def _format_printable_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Return the text of a warning. The text includes a line of source code unless the code is shardio's."""
    if Path(filename).is_relative_to(_PACKAGE):
        text = f"warning: {message}\n"
    else:
        text = _format_warning(message, category, filename, lineno, line)
    return printable(text, keep="\n\t")


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
        print_error("--plot needs matplotlib", "pip install matplotlib")
        raise typer.Exit(1) from error


def name_of(name: str) -> str:
    """Return a path as pathlib writes it, or a URL without its trailing slash."""
    from shardio.storage import find_url  # This loads numpy, which `--version` does not need.

    url = find_url(name)
    return str(Path(name)) if url is None else url.rstrip("/")


def format_counts(counts: Counter[str]) -> str:
    """Return counts as text, the largest first, such as ``2 × PNG, 1 × 4 components``."""
    return ", ".join(f"{num_things} × {thing}" for thing, num_things in counts.most_common())


def make_bar() -> ProgressBar:
    """Return a progress bar on standard error, with a description, a rate and the remaining time."""
    from rich.console import Console  # Only terminals need rich, which takes 30 ms to import.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as ProgressBar, TextColumn, TimeRemainingColumn

    return ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class ProgressReporter(WorkProgress):
    """A thread-safe context manager that shows the progress of work: a bar on a terminal, lines elsewhere.

    Attributes:
        num_done: The number of finished items.
        num_bytes: The size of the finished items in bytes, if reported.
        num_samples: The number of samples in the finished items, if reported.

    Args:
        doing: The work in one word, such as ``verifying``.
        noun: The plural noun for the counted items.
    """

    def __init__(self, doing: str, noun: str = "samples") -> None:
        self.num_done = self.num_bytes = self.num_samples = 0
        self._doing, self._noun = doing, noun
        self._total = 0
        self._lock = threading.Lock()
        self._bar: ProgressBar | None = None
        self._start = self._last_line = time.monotonic()

    def start(self, total: int, num_bytes: int | None = None) -> None:
        self._total = total
        self._start = self._last_line = time.monotonic()
        if total and sys.stderr.isatty():
            self._bar = make_bar()
            self._bar.start()
            self._bar.add_task(self._doing, total=total, rate="")
        elif num_bytes is not None:
            echo(f"{self._doing} {count(total, self._noun.removesuffix('s'))}, {format_bytes(num_bytes)}", err=True)

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        with self._lock:
            self.num_done += num_done
            self.num_bytes += num_bytes
            self.num_samples += num_samples
            now = time.monotonic()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self.num_done, rate=self._rate(now))
            elif now - self._last_line >= LINE_EVERY_S:
                self._last_line = now
                left_s = (now - self._start) * (self._total / self.num_done - 1) if self.num_done else float("inf")
                echo(
                    f"{self._doing}: {self.num_done} of {self._total} {self._noun}, {self._rate(now)}, "
                    f"about {left_s:.0f} s left",
                    err=True,
                )

    @property
    def elapsed_s(self) -> float:
        """The time since the start, in seconds."""
        return time.monotonic() - self._start

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _rate(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        rate = self.num_done / seconds
        bytes_rate = f", {format_bytes(self.num_bytes / seconds)}/s" if self.num_bytes else ""
        return f"{rate:.{1 if rate < 10 else 0}f} {self._noun}/s{bytes_rate}"
