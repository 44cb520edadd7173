"""Conformance tests of executors, which make a loader's batches: the interface is in ``shardio/loader/executor.py``.

Example:
    >>> import pytest
    >>> from shardio.testing.executor import ExecutorTests, Samples, Start
    >>>
    >>> class TestMyExecutor(ExecutorTests):
    ...     @pytest.fixture
    ...     def start(self, samples: Samples) -> Start:
    ...         executor = MyExecutor(map(samples, range(12)), batch_size=3)
    ...         return lambda: executor.start(None, None)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardio.loader.executor import BatchIterator
from shardio.loader.wire import Failure

NUM_SAMPLES = 12
BATCH_SIZE = 3

BATCHES = [list(range(first, first + BATCH_SIZE)) for first in range(0, NUM_SAMPLES, BATCH_SIZE)]
"""The batches of each epoch."""

DEADLINE_S = 60.0

Start = Callable[[], BatchIterator]
"""A function that begins an epoch."""


class RefusedSampleError(LookupError):
    """The error of the sample that fails."""


class Samples:
    """The user's function that makes each sample. It can be sent to any process.

    Args:
        gate: A file. Some samples wait until it exists.

    Attributes:
        fails: The sample that raises RefusedSampleError.
        waits: The first sample that waits for the file.
    """

    def __init__(self, gate: Path) -> None:
        self.gate, self.fails, self.waits = gate, -1, NUM_SAMPLES

    def __call__(self, number: int) -> int:
        """Return ``number``.

        Raises:
            RefusedSampleError: If this sample fails.
        """
        if number == self.fails:
            raise RefusedSampleError(number)
        deadline = time.monotonic() + DEADLINE_S
        while number >= self.waits and not self.gate.exists():
            assert time.monotonic() < deadline, "the gate was never opened"
            time.sleep(0.01)
        return number


class ExecutorTests:
    """Tests of an executor and of its iterators.

    Override :meth:`start`. It begins epochs of the batches [0, 1, 2] … [9, 10, 11], as lists or tensors. Each number is
    a value that ``samples`` returned. If the executor does not support what some tests check, override their fixtures
    :meth:`survives` and :meth:`knows`.
    """

    @pytest.fixture
    def samples(self, tmp_path: Path) -> Samples:
        """Return the function that makes each sample. A test may change its attributes before it begins an epoch."""
        return Samples(tmp_path / "gate")

    @pytest.fixture
    def start(self, samples: Samples) -> Start:
        """Return a function that begins an epoch of the executor. All epochs are the same."""
        raise NotImplementedError("override the fixture start")

    @pytest.fixture
    def survives(self) -> bool:
        """Return whether an epoch continues after a sample that fails."""
        return True

    @pytest.fixture
    def knows(self) -> bool:
        """Return whether ``is_ready`` is false while the next batch is being made."""
        return True

    def test_an_epoch_is_delivered_in_order_and_can_be_left(self, start: Start) -> None:
        for asks in (False, True):
            batches = start()
            assert receive(batches, asks=asks) == BATCHES
            assert batches.is_ready(0), "nothing is missing after the end"
        for num_received in (0, 1):
            batches = start()
            assert [take(batches) for _ in range(num_received)] == BATCHES[:num_received]
            batches.close()
            batches.close()
        assert receive(start(), asks=True) == BATCHES, "earlier epochs leave nothing behind"

    def test_a_batch_that_fails_is_one_batch(self, start: Start, samples: Samples, survives: bool) -> None:
        if not survives:
            pytest.skip("its epochs end with an error")
        samples.fails = 4
        batches = start()
        received = list[Any]()
        for _ in BATCHES:
            wait_for(batches)
            try:
                received.append(take(batches))
            except RefusedSampleError:
                received.append(None)
        assert received == [BATCHES[0], None, *BATCHES[2:]]
        with pytest.raises(StopIteration):
            take(batches)

    def test_it_knows_whether_the_next_batch_is_there(self, start: Start, samples: Samples, knows: bool) -> None:
        if not knows:
            pytest.skip("only a request shows whether a batch is ready")
        samples.waits = BATCH_SIZE
        batches = start()
        assert take(batches) == BATCHES[0]
        assert not batches.is_ready(0.01)
        assert not batches.is_ready(0)
        samples.gate.touch()
        assert [BATCHES[0], *receive(batches, asks=True)] == BATCHES


def take(batches: BatchIterator) -> Sequence[int]:
    """Return the next batch as a list, or raise its error."""
    batch = next(batches)
    if isinstance(batch, Failure):
        raise batch.restore()
    return list(map(int, batch))


def wait_for(batches: BatchIterator) -> None:
    """Wait until the next batch is ready."""
    deadline = time.monotonic() + DEADLINE_S
    while not batches.is_ready(0.01):
        assert time.monotonic() < deadline, "the next batch never came"


def receive(batches: BatchIterator, *, asks: bool) -> list[Sequence[int]]:
    """Return all remaining batches. With ``asks``, wait until each is ready before requesting it."""
    received = list[Sequence[int]]()
    while True:
        if asks and received:  # Some iterators begin the epoch with the first request.
            wait_for(batches)
        try:
            received.append(take(batches))
        except StopIteration:
            return received
