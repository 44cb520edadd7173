"""The iterator of a DevicePrefetcher: one epoch of batches on the device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardio.device.in_flight import InFlightBatches, SynchronousBatches
from shardio.device.waiting import WaitingTimes
from shardio.handover import Count, asking_for_rng_keys, find_held, hand_over, held_back, restore_held
from shardio.interruptions import cut_short, describe_error, let_through, no_end
from shardio.torch_modes import outside_of_inference_mode

CHECK_S = 0.001
"""How long to wait for the loader before looking whether the device has run out of work."""


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
        times: The prefetcher's counts and times.
        watch: Returns a context in which the loader's epoch begins.
        is_ahead: Whether the loader counts a batch when it is requested, so that the loader's
            state is ahead of the user.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batches: InFlightBatches | SynchronousBatches,
        depth: int,
        last_received: LastReceived,
        times: WaitingTimes,
        watch: Callable[[], AbstractContextManager[object]],
        *,
        is_ahead: bool,
    ) -> None:
        self._loader, self._in_flight, self._depth = loader, batches, depth
        self._last_received, self._is_ahead = last_received, is_ahead
        self._times, self._watch = times, watch
        self._batches: Iterator[Any] | None = None
        self._failure: _Failure | None = None
        self._late_counts: list[Count] = []
        self._is_open = True
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

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting() and hasattr(self, "_cut_short_by"):  # The last attribute of __init__.
            self.close()

    def _receive(self) -> tuple[Any, Exception | None]:
        """Return the next batch and None, or None and the error instead of a batch."""
        self._in_flight.request(self._depth)
        hand_over(self._late_counts)
        self._late_counts = []
        while self._failure is None and len(self._in_flight) < self._depth and self._can_send():
            self._failure = self._send_next()
        if len(self._in_flight):
            batch, on_receipt = self._in_flight.receive()
            self._last_received.state = on_receipt.state
            self._times.num_batches += 1
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

    def _can_send(self) -> bool:
        """Return whether to request another batch of the loader before the next one in flight is returned.

        While the device has work, this waits for the loader. As soon as it has none, a batch that is in flight is worth
        more than one that is not there. The loader's iterator tells by ``is_ready(timeout_s)`` whether it has one.
        """
        is_ready = getattr(self._batches, "is_ready", None)
        if not len(self._in_flight) or not callable(is_ready):
            return True
        began = time.perf_counter()
        try:
            while not is_ready(CHECK_S):
                if self._in_flight.is_consumer_idle():
                    return False
        except Exception as error:  # It is raised after the batches in flight.
            let_through(error)
            self._failure = _Failure(error, [], [])
            return False
        finally:
            self._times.loader_wait_s += time.perf_counter() - began
        return True

    def _send_next(self) -> _Failure | None:
        """Request the loader's next batch and send it. Return the failure, if there is one."""
        # The state of a loader that is ahead includes its parts, so they must count at the same time.
        with nullcontext(list[Count]()) if self._is_ahead else held_back() as counts, asking_for_rng_keys() as keys:
            began = time.perf_counter()
            try:
                batch = self._take()
            except StopIteration as end:
                return _Failure(end.with_traceback(None), counts, [])  # The traceback would keep a batch on the device.
            except Exception as error:
                let_through(error)
                return _Failure(error, counts, [])
            finally:
                self._times.loader_wait_s += time.perf_counter() - began
        rng_key = keys.take()
        state = self._loader.state_dict() if self._is_ahead else None  # type: ignore[attr-defined]
        try:
            with outside_of_inference_mode():
                self._in_flight.send(batch, _OnReceipt(counts, state), rng_key)
        except Exception as error:  # From the user's transform or the device.
            let_through(error)
            return _Failure(no_end(error), [], counts)
        return None

    def _take(self) -> Any:
        """Return the loader's next batch. The first one begins its epoch."""
        if self._batches is not None:
            return next(self._batches)
        with self._watch():
            self._batches = iter(self._loader)
            return next(self._batches)  # Some iterators begin the epoch only now.
