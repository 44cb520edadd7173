"""Show the progress and the outcomes of a campaign, and how its processes ended."""

from __future__ import annotations

import signal
from collections import Counter
from multiprocessing.process import BaseProcess

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERRUPTED = 130
"""The exit code that shells report after Ctrl-C."""


def make_progress(what: str) -> Progress:
    """Return a progress bar on standard error. ``what`` names the counted items."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def show(outcomes: Counter[str]) -> str:
    """Return a table with the number of occurrences of each outcome."""
    return "\n".join(f"{count:>12,}  {outcome}" for outcome, count in sorted(outcomes.items()))


def describe_end(process: BaseProcess, alarm: int, too_long: str) -> str:
    """Wait for a process to end, and describe how it ended: ``too_long`` if the signal ``alarm`` ended it."""
    process.join()
    code = process.exitcode or 0
    if code == -alarm:
        return too_long
    return f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
