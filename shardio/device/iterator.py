"""The iterator of a DevicePrefetcher: one epoch of batches on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardio.device.in_flight import InFlightBatches, SynchronousBatches
from shardio.handover import Count, find_held, hand_over, held_back, restore_held
from shardio.interruptions import cut_short, describe_error, let_through, no_end
from shardio.torch_modes import outside_of_inference_mode


@dataclass(slots=True)
class LastReceived:
    """The last batch that the user received. It outlives an iterator that is left early.

    Attributes:
        state: The loader's state as of that batch; None if the loader's own state is up to date.
    """

    state: dict[str, Any] | None = None


class _OnReceipt(NamedTuple):
    """The functions to call, and the loader's state, when the user receives a batch."""

    counts: list[Count]
    state: dict[str, Any] | None


class _Failure(NamedTuple):
    """An error instead of a batch. StopIteration counts as one."""

    error: Exception
    counts: list[Count]
    late_counts: list[Count]


class PrefetchIterator:
    """An iterator over batches on the device, with several batches in flight.

    An error of the loader is raised after the batches that precede it. It ends this iterator only
    if it ends the loader's iterator. A batch that fails on its way to the device counts as
    received when the next batch is requested.

    Args:
        loader: The source of batches.
        batches: The batches in flight. This iterator closes them.
        depth: The number of batches to keep in flight.
        last_received: The record of the last batch, updated when a batch is returned.
        is_ahead: Whether the loader counts a batch when it is requested, so that the loader's
            state is ahead of the user.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batches: InFlightBatches | SynchronousBatches,
        depth: int,
        last_received: LastReceived,
        *,
        is_ahead: bool,
    ) -> None:
        self._loader, self._in_flight, self._depth = loader, batches, depth
        self._last_received, self._is_ahead = last_received, is_ahead
        self._batches: Iterator[Any] | None = None
        self._failure: _Failure | None = None
        self._late_counts: list[Count] = []
        self._is_open, self._has_consumer = True, False
        self._cut_short_by: str | None = None

    def __iter__(self) -> PrefetchIterator:
        return self

    def __next__(self) -> Any:
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        if not self._is_open:
            raise StopIteration
        held = find_held()
        self._cut_short_by = "an error"  # Until a batch is returned, any interruption may lose one.
        try:
            batch, error = self._receive()
        except BaseException as interruption:
            restore_held(held)
            self._cut_short_by = describe_error(interruption)
            raise
        self._cut_short_by = None
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # Otherwise its traceback, which holds this frame, would keep the loader's iterator alive.

    def close(self) -> None:
        """Wait until all copies are done, and release the loader's iterator."""
        if self._is_open:
            self._is_open, self._batches = False, None
            self._in_flight.close()

    def __del__(self) -> None:
        if hasattr(self, "_cut_short_by"):  # The last attribute of __init__.
            self.close()

    def _receive(self) -> tuple[Any, Exception | None]:
        """Return the next batch and None, or None and the error instead of a batch."""
        if self._has_consumer:
            self._in_flight.wait_for_consumer(self._depth)
            self._has_consumer = False
        hand_over(self._late_counts)
        self._late_counts = []
        while self._failure is None and len(self._in_flight) < self._depth:
            self._failure = self._send_next()
        if len(self._in_flight):
            batch, on_receipt = self._in_flight.receive()
            self._last_received.state, self._has_consumer = on_receipt.state, True
            hand_over(on_receipt.counts)
            return batch, None
        assert self._failure is not None, "nothing is in flight"
        failure, self._failure, self._last_received.state = self._failure, None, None
        self._late_counts = failure.late_counts
        hand_over(failure.counts)
        if isinstance(failure.error, StopIteration):
            self.close()
        try:
            return None, failure.error
        finally:
            del failure  # As in __next__.

    def _send_next(self) -> _Failure | None:
        """Request the loader's next batch and send it. Return the failure, if there is one."""
        # The state of a loader that is ahead includes its parts, so they must count at the same time.
        with nullcontext(list[Count]()) if self._is_ahead else held_back() as counts:
            try:
                if self._batches is None:
                    self._batches = iter(self._loader)
                batch = next(self._batches)
            except Exception as error:  # Including StopIteration.
                let_through(error)
                return _Failure(error, counts, [])
        state = self._loader.state_dict() if self._is_ahead else None  # type: ignore[attr-defined]
        try:
            with outside_of_inference_mode():
                self._in_flight.send(batch, _OnReceipt(counts, state))
        except Exception as error:  # From the user's transform or the device.
            let_through(error)
            return _Failure(no_end(error), [], counts)
        return None
