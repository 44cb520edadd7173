"""Times of a fault proxy: limits of bandwidth, and a selector whose timeouts are finer than milliseconds."""

from __future__ import annotations

import asyncio
import select
import selectors
import sys
import time

MAX_LATE_S = 0.01

if sys.platform == "linux":

    class FineSelector(selectors.EpollSelector):
        """Wait with a resolution of microseconds. epoll rounds timeouts up to milliseconds, which 75 kB rarely take."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

else:
    FineSelector = selectors.DefaultSelector


class Pace:
    """The times at which a link of limited bandwidth has carried its bytes. An idle link saves nothing up.

    Args:
        bytes_per_s: The bandwidth, or None for no limit.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._late_s = 0.0

    def reserve(self, num_bytes: int, start: float, *, is_first: bool) -> float:
        """Return when the link has carried the next bytes, after all that it carries already.

        Args:
            num_bytes: The number of bytes.
            start: When they can begin.
            is_first: Whether they begin a body. The others have waited while the proxy sent what came before them.
        """
        if self.bytes_per_s is None:
            return start
        start = max(self._free_at, start - (self._late_s if is_first else MAX_LATE_S))
        self._late_s = 0.0
        self._free_at = start + num_bytes / self.bytes_per_s
        return self._free_at

    def note_late(self, late_s: float) -> None:
        """Say how much later than planned something happened, so that the next bytes make up for it."""
        self._late_s = min(max(late_s, 0.0), MAX_LATE_S)


async def sleep_until(when: float) -> float:
    """Sleep until a time of :func:`time.monotonic`; return how much later it is now, in seconds."""
    delay_s = when - time.monotonic()
    if delay_s > 0:
        await asyncio.sleep(delay_s)
    return time.monotonic() - when
