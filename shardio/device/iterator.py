"""The iterator of a DevicePrefetcher: one epoch of batches on the device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from shardio.device.in_flight import InFlightBatches, SynchronousBatches
from shardio.device.waiting import WaitingTimes
from shardio.errors import StateError
from shardio.handover import (
    Count,
    asking_for_rng_keys,
    counted_at_once,
    find_held,
    hand_over,
    held_back,
    restore_held,
)
from shardio.interruptions import cut_short, describe_error, let_through, no_end
from shardio.torch_modes import outside_of_inference_mode

CHECK_S = 0.001
"""How long to wait for the loader before looking whether the device has run out of work."""


@dataclass(slots=True)
class LastReceived:
    """The last batch that the user received. It outlives an iterator that is left early.

    Attributes:
        state: The loader's state as of that batch, or the error to raise when it is wanted; None if the loader's own
            state is up to date.
    """

    state: dict[str, Any] | StateError | None = None


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
            state is ahead of the user while batches are in flight or held back.
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
            batch, counts = self._in_flight.receive()
            self._times.num_batches += 1
            hand_over(counts)
            return batch, None
        assert self._failure is not None, "nothing is in flight"
        failure, self._failure = self._failure, None
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
        saves_state = self._is_ahead and (not self._in_flight.is_synchronous or find_held() is not None)
        # The state of a loader that is ahead includes its parts, so they must count at the same time.
        with counted_at_once() if saves_state else held_back() as counts, asking_for_rng_keys() as keys:
            began = time.perf_counter()
            try:
                batch = self._take()
            except StopIteration as end:
                end.with_traceback(None)  # It would keep a batch on the device.
                return _Failure(end, [*counts, *self._note_state(None)], [])
            except Exception as error:
                let_through(error)
                return _Failure(error, [*counts, *self._note_state(None)], [])
            finally:
                self._times.loader_wait_s += time.perf_counter() - began
        rng_key = keys.take()
        counts += self._note_state(self._ask_for_state() if saves_state else None)
        try:
            with outside_of_inference_mode():
                self._in_flight.send(batch, counts, rng_key)
        except Exception as error:  # From the user's transform or the device.
            let_through(error)
            return _Failure(no_end(error), [], counts)
        return None

    def _ask_for_state(self) -> dict[str, Any] | StateError:
        loader: Any = self._loader
        try:
            state: dict[str, Any] = loader.state_dict()
        except Exception as error:  # A user's method may fail in any way, and nobody may want the state.
            let_through(error)
            what = f"{type(loader).__name__}.state_dict() raised {describe_error(error)}"
            return StateError(f"the position of this batch is not known, because {what}")
        return state

    def _note_state(self, state: dict[str, Any] | StateError | None) -> list[Count]:
        """Return what sets the state of the last batch that the user received, if the loader's own is ahead of it."""
        return [partial(setattr, self._last_received, "state", state)] if self._is_ahead else []

    def _take(self) -> Any:
        """Return the loader's next batch. The first one begins its epoch."""
        if self._batches is not None:
            return next(self._batches)
        with self._watch():
            self._batches = iter(self._loader)
            return next(self._batches)  # Some iterators begin the epoch only now.
