"""The progress of work on shards or images: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time

from shardio.cli.console import LINE_EVERY_S, count, format_bytes, make_bar
from shardio.cli.terminal import echo


class ShardProgress:
    """Shows how many bytes of shards are done. A context manager.

    Args:
        doing: What is done with the shards, such as ``verifying``.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._bar = make_bar() if sys.stderr.isatty() else None
        self.num_samples = self.num_shards = self.num_bytes = self._total_bytes = 0
        self._start = self._last_line = time.monotonic()

    def found(self, num_bytes: int) -> None:
        """Receive the total size of the shards."""
        self._total_bytes = num_bytes
        self._start = self._last_line = time.monotonic()
        if self._bar is not None:
            self._bar.start()
            self._bar.add_task(self._doing, total=num_bytes >> 20, rate="")

    def verified(self, num_samples: int, num_bytes: int) -> None:
        """Receive the numbers of samples and bytes of a shard that is done."""
        self.num_samples += num_samples
        self.num_shards += 1
        self.num_bytes += num_bytes
        now = time.monotonic()
        rate = f"{format_bytes(self.num_bytes / max(now - self._start, 1e-9))}/s"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.num_bytes >> 20, rate=f"MiB, {rate}")
        elif now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            done = f"{format_bytes(self.num_bytes)} of {format_bytes(self._total_bytes)}"
            echo(f"{self._doing}: {count(self.num_shards, 'shard')}, {done}, {rate}", err=True)

    @property
    def elapsed_s(self) -> float:
        """The time since the start, in seconds."""
        return time.monotonic() - self._start

    def __enter__(self) -> ShardProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


class CountReporter:
    """Shows how much of a number of things is done, on standard error: a bar on a terminal, else lines.

    A context manager.

    Args:
        verb: What is being done, such as "hashing".
        noun: What is counted, in the plural.
    """

    def __init__(self, verb: str, noun: str) -> None:
        self._verb, self._noun = verb, noun
        self._bar = make_bar() if sys.stderr.isatty() else None
        self._num_done = self._total = 0
        self._start = self._last_line = time.monotonic()

    def start(self, total: int) -> None:
        """Begin, given the number of things."""
        self._total = total
        self._start = self._last_line = time.monotonic()
        if self._bar is not None and total:
            self._bar.start()
            self._bar.add_task(self._verb, total=total, rate="")

    def advance(self, num_done: int) -> None:
        """Report that further things are done."""
        self._num_done += num_done
        now = time.monotonic()
        rate = self._num_done / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._num_done, rate=f"{rate:.0f} {self._noun}/s")
        elif now - self._last_line >= LINE_EVERY_S:
            self._last_line = now
            left_s = (self._total - self._num_done) / rate
            echo(
                f"{self._verb}: {self._num_done} of {self._total} {self._noun}, {rate:.0f} {self._noun}/s, "
                f"about {left_s:.0f} s left",
                err=True,
            )

    def __enter__(self) -> CountReporter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
