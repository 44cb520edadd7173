"""Fetch what will be read soon into the cache, in the background.

The order is known, so a thread plans what to fetch for a whole *stretch* of the epoch at once. What is planned depends
on how the samples are stored: see :mod:`~shardio.reading.remote_shards` and :mod:`~shardio.reading.remote_files`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from queue import SimpleQueue
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardio.reading.threads import map_in_threads

CHECK_S = 0.5
"""How often the thread looks whether the rank has come further or was stopped, in seconds."""


class RemoteSamples(Protocol):
    """Samples in a remote store, which can be fetched into a cache."""

    def choose_lengths(self, first: int | None, size: int | None) -> Iterator[int]:
        """Yield the number of samples in each stretch, at least 1, without an end.

        Args:
            first: How many of the rank's samples lie in the rest of the first window of all lanes; None without
                shuffling.
            size: How many lie in each further window of all lanes; None without shuffling.
        """

    def plan(self, indices: NDArray[np.int64], num_before: int) -> Sequence[Callable[[], object]]:
        """Return functions that fetch the samples of a stretch, in the order in which they are needed.

        Args:
            indices: int64 [n], the indices of the samples, in the order in which they are needed.
            num_before: The number of samples in the stretches before this one.
        """


class ReadAhead:
    """A thread that fetches what one rank reads soon, at most one stretch further than the rank has come.

    Args:
        samples: The samples.
        stretches: The indices of the rank's samples in the order of the epoch: int64 arrays, one for each stretch.
    """

    def __init__(self, samples: RemoteSamples, stretches: Iterator[NDArray[np.int64]]) -> None:
        self._samples, self._stretches = samples, stretches
        self._num_read = 0
        self._moved = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="shardio-read-ahead", daemon=True)
        self._thread.start()

    def advance(self, num_samples: int) -> None:
        """Note that the rank has read that many further samples."""
        self._num_read += num_samples
        if self._moved.acquire(blocking=False):  # Never wait: the thread looks again soon.
            self._moved.notify_all()
            self._moved.release()

    def close(self) -> None:
        """Stop. What is being fetched arrives all the same."""
        self._is_closed = True

    def _run(self) -> None:
        num_before = begin = 0
        for stretch in self._stretches:
            while self._num_read < begin and not self._is_closed:
                with self._moved:
                    self._moved.wait(CHECK_S)
            if self._is_closed:
                return
            begin, num_before = num_before, num_before + len(stretch)
            map_in_threads(self._fetch, self._samples.plan(stretch, begin))

    def _fetch(self, fetch: Callable[[], object]) -> None:
        if not self._is_closed:
            fetch()


def read_stretches_ahead(
    samples: RemoteSamples, upcoming: Iterator[NDArray[np.int64]], first: int | None = None, size: int | None = None
) -> AbstractContextManager[Callable[[int], object]]:
    """Return a context in which samples are read ahead in a known order.

    Its value is a function to call with the number of samples that are about to be read.

    Args:
        samples: The samples.
        upcoming: The indices of the rank's samples in the order of the epoch: int64 arrays of any lengths.
        first: How many of the rank's samples lie in the rest of the first window of all lanes; None without shuffling.
        size: How many lie in each further window of all lanes; None without shuffling.
    """
    return _reading_ahead(ReadAhead(samples, _cut(upcoming, samples.choose_lengths(first, size))))


@contextmanager
def read_batches_ahead(samples: RemoteSamples) -> Iterator[Callable[[NDArray[np.int64]], object]]:
    """Read batches ahead that a sampler draws. The context's value is a function to call with each batch's indices."""
    batches = SimpleQueue[NDArray[np.int64] | None]()

    def take() -> Iterator[NDArray[np.int64]]:
        while (indices := batches.get()) is not None:
            yield indices

    with _reading_ahead(ReadAhead(samples, take())) as advance:

        def add(indices: NDArray[np.int64]) -> None:
            batches.put(indices)
            advance(len(indices))

        try:
            yield add
        finally:
            batches.put(None)


def read_nothing_ahead() -> AbstractContextManager[Callable[[object], object]]:
    """Return the context for samples that need not be read ahead."""
    return nullcontext(_ignore)


def _ignore(samples: object) -> None:
    pass


@contextmanager
def _reading_ahead(ahead: ReadAhead) -> Iterator[Callable[[int], object]]:
    with closing(ahead):
        yield ahead.advance


def _cut(arrays: Iterator[NDArray[np.int64]], lengths: Iterator[int]) -> Iterator[NDArray[np.int64]]:
    """Yield the same values in arrays of other lengths. The last one may be shorter."""
    length, pending, num_pending = next(lengths), list[NDArray[np.int64]](), 0
    for array in arrays:
        pending.append(array)
        num_pending += len(array)
        while num_pending >= length:
            whole = np.concatenate(pending)
            yield whole[:length]
            pending, num_pending, length = [whole[length:]], num_pending - length, next(lengths)
    if num_pending:
        yield np.concatenate(pending)
