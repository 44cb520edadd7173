"""Conformance tests of executors, which make a loader's batches: the interface is in ``shardio/loader/executor.py``.

Example:
    >>> import pytest
    >>> from shardio.loader.executor import Executor
    >>> from shardio.testing.executor import ExecutorParts, ExecutorTests
    >>>
    >>> class TestMyExecutor(ExecutorTests):
    ...     @pytest.fixture
    ...     def executor(self, parts: ExecutorParts) -> Executor:
    ...         return MyExecutor(parts.planner, parts.batches)
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from shardio.datasets import ShardDataset
from shardio.loader.any_dataset import FetchSource
from shardio.loader.choice import find_settings, make_batch_settings, make_planner, make_source
from shardio.loader.data_loader import DataLoader
from shardio.loader.executor import BatchIterator, Executor, ExecutorSettings
from shardio.loader.extension import find_extension
from shardio.loader.wire import Failure
from shardio.order import Cursor, Split
from shardio.packing import ShardWriter

NUM_SAMPLES = 12
BATCH_SIZE = 3

BATCHES = [list(range(first, first + BATCH_SIZE)) for first in range(0, NUM_SAMPLES, BATCH_SIZE)]
"""The batches of each epoch."""

DEADLINE_S = 60.0

Start = Callable[..., BatchIterator]
"""A function that begins an epoch, perhaps given a cursor and a split."""


class RefusedSampleError(LookupError):
    """The error of the sample that fails."""


class Samples:
    """The user's function that makes each sample. It can be sent to any process.

    Args:
        gate: A file. Some samples wait until it exists.

    Attributes:
        fails: The sample that raises RefusedSampleError.
        waits: The first sample that waits for the file.
        callers: A folder with an empty file for each process that has made samples. The file's name is the process id.
    """

    def __init__(self, gate: Path) -> None:
        self.gate, self.fails, self.waits = gate, -1, NUM_SAMPLES
        self.callers = gate.with_name("callers")
        self.callers.mkdir(exist_ok=True)

    def __call__(self, number: int) -> int:
        """Return ``number``.

        Raises:
            RefusedSampleError: If this sample fails.
        """
        (self.callers / str(os.getpid())).touch()
        if number == self.fails:
            raise RefusedSampleError(number)
        deadline = time.monotonic() + DEADLINE_S
        while number >= self.waits and not self.gate.exists():
            assert time.monotonic() < deadline, "the gate was never opened"
            time.sleep(0.01)
        return number


class FromText:
    """A transform that calls ``samples`` with the number in the field ``txt``."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __call__(self, sample: Mapping[str, Any]) -> int:
        """Return the number."""
        return self.samples(int(sample["txt"]))


def write_samples(folder: Path) -> Path:
    """Write a packed dataset with the samples in order, and return its folder."""
    with ShardWriter(folder) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:02d}", "txt": str(number)})
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorParts:
    """The arguments with which shardio creates and starts the executors of one loader.

    An executor needs either the source, to call the dataset, or the planner and the batches, to read it.

    Attributes:
        settings: The loader's settings.
        source: The source of the samples.
        planner: The planner of the batches; None if shardio's own code cannot make them.
        batches: The settings of the batches; None if shardio's own code cannot make them.
        cursor: The start of the first epoch; None if the order is not shardio's.
        split: This rank's share of that epoch; None if the order is not shardio's.
    """

    settings: ExecutorSettings
    source: FetchSource
    planner: Any
    batches: Any
    cursor: Cursor | None
    split: Split | None


def find_parts(loader: DataLoader) -> ExecutorParts:
    """Return the parts of a loader's executor. Keep the loader: some parts refer to it weakly."""
    extension = find_extension(loader)
    assert extension is not None, "DataLoader's constructor has made it"
    settings = find_settings(loader, extension.arguments)
    order, epochs, decoder = extension.order, extension.epochs, settings.decoder if settings.is_ours else None
    cursor, split = extension.find_start(loader)
    return ExecutorParts(
        settings=settings,
        source=make_source(loader, settings, order, epochs, None),
        planner=make_planner(loader, settings, order, epochs) if decoder is not None else None,
        batches=make_batch_settings(settings, decoder, None) if decoder is not None else None,
        cursor=cursor,
        split=split,
    )


class ExecutorTests:
    """Tests of an executor and of its iterators.

    Override :meth:`executor`, and :meth:`loader` if it needs a loader other than the default. Its epochs have the
    batches [0, 1, 2] … [9, 10, 11], as lists or tensors. Each number is a value that ``samples`` returned. If the
    executor does not support what some tests check, override their fixtures :meth:`survives`, :meth:`knows` and
    :meth:`takes_split`.
    """

    @pytest.fixture
    def samples(self, tmp_path: Path) -> Samples:
        """Return the function that makes each sample. A test may change its attributes before it begins an epoch."""
        return Samples(tmp_path / "gate")

    @pytest.fixture
    def loader(self, samples: Samples, tmp_path: Path) -> DataLoader:
        """Return a loader of the samples; by default, over a ShardDataset, with one worker."""
        dataset = ShardDataset(write_samples(tmp_path / "packed"), fields=("txt",), transform_sample=FromText(samples))
        return DataLoader(dataset, BATCH_SIZE, num_workers=1)

    @pytest.fixture
    def parts(self, loader: DataLoader) -> ExecutorParts:
        """Return the parts of the loader's executor."""
        return find_parts(loader)

    @pytest.fixture
    def executor(self, parts: ExecutorParts) -> Executor:
        """Return the executor."""
        raise NotImplementedError("override the fixture executor")

    @pytest.fixture
    def start(self, executor: Executor, parts: ExecutorParts) -> Start:
        """Return a function that begins an epoch of the executor. Without arguments, all epochs are the same."""

        def start(cursor: Cursor | None = parts.cursor, split: Split | None = parts.split) -> BatchIterator:
            return executor.start(cursor, split)

        return start

    @pytest.fixture
    def survives(self) -> bool:
        """Return whether an epoch continues after a sample that fails."""
        return True

    @pytest.fixture
    def knows(self) -> bool:
        """Return whether ``is_ready`` is false while the next batch is being made."""
        return True

    @pytest.fixture
    def takes_split(self, parts: ExecutorParts) -> bool:
        """Return whether an epoch begins at a cursor and has one rank's share."""
        return parts.split is not None

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

    def test_an_epoch_begins_at_its_cursor_and_has_the_share_of_its_rank(
        self, start: Start, parts: ExecutorParts, takes_split: bool
    ) -> None:
        if not takes_split:
            pytest.skip("its order is not shardio's")
        assert parts.split is not None
        second = Cursor(epoch=1, position=BATCH_SIZE)
        assert receive(start(second, replace(parts.split, start=second.position)), asks=False) == BATCHES[1:]
        third = Cursor(epoch=0, position=2 * BATCH_SIZE)
        for rank in range(2):
            share = replace(parts.split, start=third.position, rank=rank, world_size=2)
            assert receive(start(third, share), asks=False) == [BATCHES[2 + rank]]

    def test_an_iterator_that_is_dropped_ends_its_workers(
        self, start: Start, samples: Samples, parts: ExecutorParts
    ) -> None:
        if parts.settings.persistent_workers:
            pytest.skip("its workers persist")
        receive(start(), asks=False)  # This starts whatever serves all epochs, such as a fork server.
        threads = set(threading.enumerate())
        batches = start()
        assert take(batches) == BATCHES[0]
        del batches
        gc.collect()
        workers = {int(file.name) for file in samples.callers.iterdir()} - {os.getpid()}
        deadline = time.monotonic() + DEADLINE_S
        while left := [*filter(_is_alive, workers), *(set(threading.enumerate()) - threads)]:
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.01)

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


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


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
