"""The laws of iterators over an epoch's batches, for those of executors and those that users get.

An executor's author checks its iterators with :func:`check_iterator` and :func:`check_failure`, and with
:func:`check_waiting` if other threads or processes make the batches.
The interface is :class:`shardio.loader.executor.BatchIterator`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shardio.loader.executor import BatchIterator
from shardio.loader.wire import Failure

Start = Callable[[], BatchIterator]
"""Begins an epoch. The epochs are the same, unless its arguments say otherwise."""

Plain = Callable[[Any], object]
"""Returns a batch as a value that can be compared."""

DEADLINE_S = 60.0


def check_iterator(start: Start, expected: Sequence[Any], plain: Plain) -> None:
    """Check whole epochs, their ends, and epochs that are left early.

    Args:
        start: Begins an epoch of at least three batches.
        expected: The batches, as ``plain`` returns them.
        plain: Returns a batch as a value that can be compared.
    """
    assert [plain(batch) for batch in _receive(start(), asks=False)] == expected
    batches = start()
    assert [plain(batch) for batch in _receive(batches, asks=True)] == expected
    assert batches.is_ready(0), "nothing is waited for after the end"
    for num_received in (0, 1):
        batches = start()
        received = [plain(_take(batches)) for _ in range(num_received)]
        assert received == expected[:num_received]
        batches.close()
        batches.close()
    assert [plain(batch) for batch in _receive(start(), asks=True)] == expected, "the epochs before have left nothing"


def check_failure(start: Start, error: type[Exception], expected: Sequence[Any], plain: Plain) -> None:
    """Check an epoch with one batch that fails.

    Args:
        start: Begins the epoch.
        error: The error of that batch.
        expected: The batches, and None instead of the one that fails.
        plain: Returns a batch as a value that can be compared.
    """
    batches = start()
    for batch in expected:
        _await(batches)
        if batch is None:
            with pytest.raises(error):
                _take(batches)
        else:
            assert plain(_take(batches)) == batch
    with pytest.raises(StopIteration):
        _take(batches)


def check_waiting(start: Start, release: Callable[[], object], expected: Sequence[Any], plain: Plain) -> None:
    """Check that the iterator tells that its next batch is being made.

    Args:
        start: Begins an epoch whose second batch is not finished before ``release`` is called.
        release: Lets the batch be finished.
        expected: All batches of the epoch.
        plain: Returns a batch as a value that can be compared.
    """
    batches = start()
    received = [plain(_take(batches))]
    assert not batches.is_ready(0.01)
    assert not batches.is_ready(0)
    release()
    received += [plain(batch) for batch in _receive(batches, asks=True)]
    assert received == expected


def _take(batches: BatchIterator) -> Any:
    batch = next(batches)
    if isinstance(batch, Failure):
        raise batch.restore()
    return batch


def _await(batches: BatchIterator) -> None:
    """Wait until the next batch is there."""
    deadline = time.monotonic() + DEADLINE_S
    while not batches.is_ready(0.01):
        assert time.monotonic() < deadline, "the next batch never came"


def _receive(batches: BatchIterator, *, asks: bool) -> list[Any]:
    """Return all batches to the end. ``asks`` says whether to wait for each before it is requested."""
    received = list[Any]()
    while True:
        if asks and received:  # Some iterators begin the epoch with the first request.
            _await(batches)
        try:
            received.append(_take(batches))
        except StopIteration:
            return received
