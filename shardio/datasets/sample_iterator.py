"""One iteration over a worker's share of an epoch, with a state for torchdata's StatefulDataLoader."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

from shardio.bad_samples import Broken
from shardio.datasets.ordered import Ordered
from shardio.errors import StateError
from shardio.interruptions import cut_short, describe_error
from shardio.order import Cursor, Split
from shardio.world import find_worker

Value = TypeVar("Value")

Start = Callable[[Cursor, Split, int], Iterator[Value]]
"""A function that iterates over a share, given a cursor, a split and the number of samples to leave out first."""


class SampleIterator(Iterator[Value], Generic[Value]):
    """An iterator that yields the samples of a share and counts them. An error in one sample does not end it.

    After an error, a loader drops that sample's batch and requests the next one, so this iterator leaves out the rest
    of the batch.

    StatefulDataLoader saves the state of each worker's iterator after every batch and sends it with the batch. So a
    state counts what was received, not what was prefetched. It fits only the same rank and worker.

    Args:
        order: Defines the share.
        cursor: Where in the epoch the share begins.
        start: Iterates over the share.
    """

    _num_to_drop: int
    _cut_short_by: str | None

    def __init__(self, order: Ordered, cursor: Cursor, start: Start[Value]) -> None:
        self._order, self._start = order, start
        self._begin(cursor, num_samples=0)

    def __next__(self) -> Value:
        if self._cut_short_by is not None:
            raise cut_short(self._cut_short_by)
        try:
            if self._num_to_drop:
                deque(islice(self._values, self._num_to_drop), maxlen=0)
                self._num_to_drop = 0
            value = next(self._values)
        except StopIteration:
            raise
        except BaseException as error:  # Such as one from a signal handler: the generator has ended, the epoch has not.
            self._cut_short_by = describe_error(error)
            raise
        self._num_samples += 1
        if isinstance(value, Broken):
            self._num_to_drop = -self._num_samples % self._split.batch_size
            self._num_samples += self._num_to_drop
            raise value.error
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this share: a small JSON-serializable dict."""
        return {
            **self._order.dump_cursor(self._cursor),
            "share": self._share(),
            "yielded": self._num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state.

        Raises:
            StateError: If it belongs to another dataset, order, rank, worker or batch size; the message names what
                differs.
        """
        cursor = self._order.read_cursor(state)
        there, here = state.get("share") or {}, self._share()
        differences = [
            f"{name} is {there.get(name)!r} in the state and {value!r} here"
            for name, value in here.items()
            if there.get(name) != value
        ]
        if differences:
            raise StateError(
                f"this state of a StatefulDataLoader belongs to another share of the epoch: {'; '.join(differences)}. "
                "Restore these settings, or use shardio.DataLoader, whose state fits any number of ranks and workers"
            )
        num_samples = state.get("yielded")
        if not isinstance(num_samples, int) or num_samples < 0:
            raise StateError(f"the state's 'yielded' must be an integer, at least 0, got {num_samples!r}")
        self._begin(cursor, num_samples)

    def _begin(self, cursor: Cursor, num_samples: int) -> None:
        # Check arguments now, not when the first sample is requested.
        self._cursor, self._split, self._num_samples = cursor, self._order.own_split(cursor), num_samples
        self._values = self._start(cursor, self._split, num_samples)
        self._num_to_drop, self._cut_short_by = 0, None

    def _share(self) -> dict[str, Any]:
        split, worker = self._split, find_worker()
        return {
            "rank": split.rank,
            "world_size": split.world_size,
            "batch_size": split.batch_size,
            "remainder": split.remainder,
            "worker_id": worker.worker_id,
            "num_workers": worker.num_workers,
        }
