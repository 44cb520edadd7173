"""One iteration over a loader's batches, on their way to a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardio.device.window import Here, Window
from shardio.handover import Count, hand_over, held_back
from shardio.interruptions import cut_short, describe_error, let_through, no_end
from shardio.torch_modes import outside_of_inference_mode


@dataclass(slots=True)
class Received:
    """Outlives an iteration that is left early.

    Attributes:
        state: The loader's state as of the last batch that was handed out; None where its own state is right.
    """

    state: dict[str, Any] | None = None


class _Note(NamedTuple):
    """What becomes true when a batch is handed out."""

    counts: list[Count]
    state: dict[str, Any] | None


class _Failure(NamedTuple):
    """What there is in the place of a batch: StopIteration, or any error."""

    error: Exception
    counts: list[Count]
    late_counts: list[Count]


class Iteration:
    """An iterator over prepared batches, some of which are under way.

    An error of the loader's comes after the batches before it, and does not end the iteration unless it ends the
    loader's. A batch that failed counts when the next one is asked for.

    Args:
        loader: Where batches come from.
        window: Those that are under way. It is closed with this.
        depth: How many these are.
        received: Is told the loader's state as of the last batch that was handed out.
        is_ahead: Whether the loader's own state is ahead of that, since it counts a batch when it is asked for.
    """

    def __init__(
        self, loader: Iterable[Any], window: Window | Here, depth: int, received: Received, *, is_ahead: bool
    ) -> None:
        self._loader, self._window, self._depth = loader, window, depth
        self._received, self._is_ahead = received, is_ahead
        self._batches: Iterator[Any] | None = None
        self._failure: _Failure | None = None
        self._late_counts: list[Count] = []
        self._is_open, self._was_handed = True, False
        self._cut_short_by: str | None = None

    def __iter__(self) -> Iteration:
        return self

    def __next__(self) -> Any:
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        if not self._is_open:
            raise StopIteration
        self._cut_short_by = "an error"  # Until a batch is handed on: whatever happens meanwhile, one may be lost.
        try:
            batch, error = self._receive()
        except BaseException as interruption:
            self._cut_short_by = describe_error(interruption)
            raise
        self._cut_short_by = None
        if error is not None:
            raise error
        return batch

    def close(self) -> None:
        """Wait until nothing is copied any more, and let go of the loader's iterator."""
        if self._is_open:
            self._is_open, self._batches = False, None
            self._window.close()

    def __del__(self) -> None:
        if hasattr(self, "_was_handed"):
            self.close()

    def _receive(self) -> tuple[Any, Exception | None]:
        """Return the next batch, or the error that there is in its place."""
        if self._was_handed:
            self._window.follow(self._depth)
            self._was_handed = False
        hand_over(self._late_counts)
        self._late_counts = []
        while self._failure is None and self._window.num_under_way < self._depth:
            self._failure = self._send_next()
        if self._window.num_under_way:
            batch, note = self._window.receive()
            self._received.state, self._was_handed = note.state, True
            hand_over(note.counts)
            return batch, None
        assert self._failure is not None, "nothing is under way"
        (error, counts, self._late_counts), self._failure, self._received.state = self._failure, None, None
        hand_over(counts)
        if isinstance(error, StopIteration):
            self.close()
        return None, error

    def _send_next(self) -> _Failure | None:
        """Send a batch, if the loader gives one and it can be sent."""
        # A loader that is ahead has a state of its own making, in which everything within must count at the same time.
        with nullcontext(list[Count]()) if self._is_ahead else held_back() as counts:
            try:
                if self._batches is None:
                    self._batches = iter(self._loader)
                batch = next(self._batches)
            except Exception as error:  # StopIteration, or anything.
                let_through(error)
                return _Failure(error, counts, [])
        state = self._loader.state_dict() if self._is_ahead else None  # type: ignore[attr-defined]
        try:
            with outside_of_inference_mode():
                self._window.send(batch, _Note(counts, state))
        except Exception as error:  # Of the user's transform, or of the device.
            let_through(error)
            return _Failure(no_end(error), [], counts)
        return None
