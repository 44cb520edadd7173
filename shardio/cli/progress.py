"""The progress of long work on standard error: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from shardio.cli.console import count, format_bytes
from shardio.cli.terminal import echo
from shardio.packing import PackProgress

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY_S = 5.0
"""Seconds between progress lines if standard error is not a terminal."""


def make_bar() -> Progress:
    """Return a progress bar on standard error, with a description, a rate and the remaining time."""
    from rich.console import Console  # Only terminals need rich, which takes 30 ms.
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


class ProgressReporter(PackProgress):
    """Shows how many things are done. A context manager. Threads may report at the same time.

    Attributes:
        num_done: The number of things that are done.
        num_bytes: Their size in bytes, if reported.
        num_samples: The number of samples in them, if reported.

    Args:
        doing: What is being done, such as ``verifying``.
        noun: What is counted, in the plural.
    """

    def __init__(self, doing: str, noun: str = "samples") -> None:
        self.num_done = self.num_bytes = self.num_samples = 0
        self._doing, self._noun = doing, noun
        self._total = 0
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._start = self._last_line = time.monotonic()

    def start(self, total: int) -> None:
        """Begin, given the number of things."""
        self._total = total
        self._start = self._last_line = time.monotonic()
        if total and sys.stderr.isatty():
            self._bar = make_bar()
            self._bar.start()
            self._bar.add_task(self._doing, total=total, rate="")

    def advance(self, num_done: int, num_bytes: int = 0, num_samples: int = 0) -> None:
        """Report that further things are done, their size in bytes, and the number of samples in them."""
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

    def planned(self, num_samples: int, num_bytes: int) -> None:
        self.start(num_samples)
        if self._bar is None:
            echo(f"{self._doing} {count(num_samples, 'sample')}, {format_bytes(num_bytes)}", err=True)

    def packed(self, num_samples: int, num_bytes: int) -> None:
        self.advance(num_samples, num_bytes)

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
