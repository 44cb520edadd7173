"""The time that the device and the program wait for data."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shardio.device.streams import StreamEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchStats:
    """The counts and times of a DevicePrefetcher since it was created.

    Attributes:
        num_batches: Batches that the user received.
        loader_wait_s: Seconds that the program waited for the loader. While the device has work left, this costs
            nothing.
        data_stall_s: Seconds that the device waited for data, with nothing left to do. On CUDA, events on the device
            measure it; the last few batches are not included yet. On other devices, it equals ``loader_wait_s``.
    """

    num_batches: int
    loader_wait_s: float
    data_stall_s: float


class WaitingTimes:
    """The running totals of a prefetcher.

    Args:
        has_stream: Whether events measure the stalls of the device. Otherwise, it waits with the program.

    Attributes:
        num_batches: See :class:`PrefetchStats`.
        loader_wait_s: See :class:`PrefetchStats`.
    """

    def __init__(self, *, has_stream: bool) -> None:
        self.num_batches = 0
        self.loader_wait_s = 0.0
        self._measured_s = 0.0
        self._unread: deque[tuple[StreamEvent, StreamEvent]] = deque()
        self._has_stream = has_stream

    def add_wait(self, requested: StreamEvent, received: StreamEvent) -> None:
        """Add the time from one event to another. It is read when the device has reached both.

        Args:
            requested: When the device had finished all work that was queued before the batch was requested.
            received: When it could begin the work that is queued afterwards.
        """
        self._unread.append((requested, received))
        self._read()

    def sum_up(self) -> PrefetchStats:
        """Return the totals."""
        self._read()
        return PrefetchStats(
            num_batches=self.num_batches,
            loader_wait_s=self.loader_wait_s,
            data_stall_s=self._measured_s if self._has_stream else self.loader_wait_s,
        )

    def _read(self) -> None:
        while self._unread and all(event.query() for event in self._unread[0]):
            requested, received = self._unread.popleft()
            self._measured_s += requested.elapsed_time(received) / 1000
