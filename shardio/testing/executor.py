"""Conformance tests for executors, which make a loader's batches. The interface is in ``shardio/loader/executor.py``.

Example:
    >>> import pytest
    >>> from shardio.testing.executor import ExecutorTests, MakeExecutor
    >>>
    >>> class TestMyExecutor(ExecutorTests):
    ...     @pytest.fixture
    ...     def make_executor(self) -> MakeExecutor:
    ...         return lambda parts: MyExecutor(parts.planner, parts.batches, timeout_s=parts.settings.timeout_s)
"""

from __future__ import annotations

import gc
import io
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardio.bad_samples import BadSamples
from shardio.datasets import ShardDataset
from shardio.loader.any_dataset import FetchSource
from shardio.loader.choice import find_settings, make_batch_settings, make_planner, make_source
from shardio.loader.data_loader import DataLoader
from shardio.loader.executor import BatchIterator, Executor, ExecutorSettings
from shardio.loader.extension import find_extension
from shardio.loader.wire import Failure
from shardio.order import Cursor, Split
from shardio.packing import ShardWriter
from shardio.transforms import RandomResizedCrop

NUM_SAMPLES = 12
BATCH_SIZE = 3

BATCHES = [list(range(first, first + BATCH_SIZE)) for first in range(0, NUM_SAMPLES, BATCH_SIZE)]
"""The batches of each epoch."""

NUM_IMAGES, IMAGES_PER_BATCH = 39, 16
"""The sizes of a dataset of images. Each full batch consists of several chunks. On two ranks, one image is repeated."""

DAMAGED = 5
"""The number of the damaged image."""

DEADLINE_S = 60.0

Start = Callable[..., BatchIterator]
"""A function that begins an epoch, and optionally takes a cursor and a split."""


class RefusedSampleError(LookupError):
    """The error that the failing sample raises."""


class Samples:
    """The user's function that makes each sample. The function can be sent to any process.

    Args:
        gate: A file; some samples wait until the file exists.

    Attributes:
        fails: The sample that raises RefusedSampleError.
        waits: The first sample that waits for the file.
        callers: A folder with an empty file for each process that has made samples. Each file's name is the process id.
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


class DrawTwice:
    """A transform that draws twice from Python's generator. Other threads can run between the two draws."""

    def __call__(self, sample: Mapping[str, Any]) -> tuple[float, float]:
        """Return both random numbers."""
        first = random.random()
        time.sleep(0.001)
        return first, random.random()


def write_samples(folder: Path) -> Path:
    """Write a packed dataset with the samples in order, and return its folder."""
    with ShardWriter(folder) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:02d}", "txt": str(number)})
    return folder


def write_images(folder: Path, *, damages: bool) -> ShardDataset:
    """Write a packed dataset of JPEGs, and damage one JPEG on request. Return the dataset with a random transform."""
    generator = np.random.default_rng(0)
    with ShardWriter(folder) as writer:
        for number in range(NUM_IMAGES):
            Image.fromarray(generator.integers(0, 256, (24, 20, 3), np.uint8)).save(file := io.BytesIO(), "JPEG")
            content = file.getvalue()[: 100 if damages and number == DAMAGED else None]
            writer.write({"__key__": f"{number:02d}", "jpg": content, "cls": number})
    return ShardDataset(folder, transform=RandomResizedCrop(16), remainder="mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorParts:
    """The arguments with which shardio creates and starts the executors of one loader.

    An executor needs either the source, to call the dataset, or the planner and the batches, to read the dataset.

    Attributes:
        settings: The loader's settings.
        source: The source of the samples.
        planner: The planner of the batches; None if shardio's own code cannot make the batches.
        batches: The settings of the batches; None if shardio's own code cannot make the batches.
        bad_samples: The policy for unreadable samples, or None to raise errors. The source and batches also hold it.
        cursor: The start of the first epoch; None if the order is not shardio's.
        split: This rank's share of that epoch; None if the order is not shardio's.
        loader: The loader, to which some parts hold weak references.
    """

    settings: ExecutorSettings
    source: FetchSource
    planner: Any
    batches: Any
    bad_samples: BadSamples | None
    cursor: Cursor | None
    split: Split | None
    loader: DataLoader


MakeExecutor = Callable[[ExecutorParts], Executor]
"""A function that makes the executor of a loader."""


def find_parts(loader: DataLoader) -> ExecutorParts:
    """Return the parts of a loader's executor."""
    extension = find_extension(loader)
    assert extension is not None, "DataLoader's constructor has made the extension"
    settings = find_settings(loader, extension.arguments)
    order, epochs, bad_samples = extension.order, extension.epochs, extension.bad_samples
    decoder = settings.decoder if settings.is_ours else None
    cursor, split = extension.find_start(loader)
    return ExecutorParts(
        settings=settings,
        source=make_source(loader, settings, order, epochs, bad_samples),
        planner=make_planner(loader, settings, order, epochs) if decoder is not None else None,
        batches=make_batch_settings(settings, decoder, bad_samples) if decoder is not None else None,
        bad_samples=bad_samples,
        cursor=cursor,
        split=split,
        loader=loader,
    )


class ExecutorTests:
    """Tests for an executor and its iterators.

    Override :meth:`make_executor`, and, if the executor does not support the default loaders, :meth:`loader` and
    :meth:`options`. The epochs of ``loader`` have the batches [0, 1, 2] … [9, 10, 11], as lists or tensors. Each number
    is a value that ``samples`` returned. If the executor does not support what some tests check, override the
    fixtures :meth:`survives`, :meth:`knows` and :meth:`takes_split`.
    """

    @pytest.fixture
    def samples(self, tmp_path: Path) -> Samples:
        """Return the function that makes each sample. Tests may change its attributes before they begin an epoch."""
        return Samples(tmp_path / "gate")

    @pytest.fixture
    def loader(self, samples: Samples, tmp_path: Path) -> DataLoader:
        """Return a loader of the samples; by default, over a ShardDataset, with one worker."""
        dataset = ShardDataset(write_samples(tmp_path / "packed"), fields=("txt",), transform_sample=FromText(samples))
        return DataLoader(dataset, BATCH_SIZE, num_workers=1)

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Return the options of the loaders that some tests create for a ShardDataset with user code or images."""
        return {"num_workers": 2}

    @pytest.fixture
    def parts(self, loader: DataLoader) -> ExecutorParts:
        """Return the parts of the loader's executor."""
        return find_parts(loader)

    @pytest.fixture
    def make_executor(self) -> MakeExecutor:
        """Return a function that makes the executor of a loader from its parts."""
        raise NotImplementedError("override the fixture make_executor")

    @pytest.fixture
    def executor(self, make_executor: MakeExecutor, parts: ExecutorParts) -> Executor:
        """Return the loader's executor, which delivers numbers."""
        return make_executor(parts)

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
        """Return whether an epoch can begin at a cursor and contain only one rank's share."""
        return parts.split is not None

    def test_an_epoch_is_delivered_in_order_and_can_be_left(self, start: Start) -> None:
        for asks in (False, True):
            batches = start()
            assert receive(batches, asks=asks) == BATCHES
            assert batches.is_ready(0), "after the last batch, there is nothing to wait for"
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
            pytest.skip("the executor's order is not shardio's")
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
            pytest.skip("the executor's workers persist")
        receive(start(), asks=False)  # The first epoch starts processes that serve all epochs.
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
            pytest.skip("the executor's epochs end with an error")
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

    def test_a_wait_ends_with_the_loaders_timeout(
        self, make_executor: MakeExecutor, loader: DataLoader, samples: Samples
    ) -> None:
        if not loader.num_workers:
            pytest.skip("the calling process makes the batches")
        loader.timeout, samples.waits = 0.1, 0
        parts = find_parts(loader)
        batches = make_executor(parts).start(parts.cursor, parts.split)
        with pytest.raises(RuntimeError, match=r"timeout|timed out"):
            take(batches)
        samples.gate.touch()
        batches.close()

    @pytest.mark.filterwarnings("ignore:unreadable samples skipped:RuntimeWarning")
    def test_batches_hold_the_datasets_samples_while_others_are_made(
        self, make_executor: MakeExecutor, options: dict[str, Any], tmp_path: Path
    ) -> None:
        samples = list(write_images(tmp_path / "whole", damages=False))
        dataset = write_images(tmp_path / "damaged", damages=True)
        options = {"on_error": "skip", "quarantine": tmp_path / "skipped", **options}
        parts = find_parts(DataLoader(dataset, IMAGES_PER_BATCH, **options))
        assert parts.split is not None, "the order is shardio's"
        executor, second = make_executor(parts), replace(parts.split, rank=1, world_size=2)
        executor.start_workers()
        share, *epochs = (
            [*iterate(executor.start(parts.cursor, split))] for split in (second, parts.split, parts.split)
        )
        positions = [second.batch(step) for step in range(second.num_batches)]
        assert [batch[2].tolist() for batch in share] == [(own < NUM_IMAGES).tolist() for own in positions]
        for batches in epochs:
            images, labels, valid = map(torch.cat, zip(*batches, strict=True))
            assert labels.tolist() == [number for number in range(NUM_IMAGES) if number != DAMAGED]
            assert all(torch.equal(image, samples[i][0]) for image, i in zip(images, labels.tolist(), strict=True))
            assert valid.all()
        if (tally := executor.tally) is not None:
            assert (tally.num_batches, tally.num_samples) == (3, NUM_IMAGES - 1)

    def test_random_numbers_of_user_code_are_the_datasets(
        self, make_executor: MakeExecutor, options: dict[str, Any], tmp_path: Path
    ) -> None:
        dataset = ShardDataset(write_samples(tmp_path / "numbers"), fields=("txt",), transform_sample=DrawTwice())
        parts = find_parts(DataLoader(dataset, BATCH_SIZE, **options))
        batches = make_executor(parts).start(parts.cursor, parts.split)
        columns = [torch.cat(column).tolist() for column in zip(*iterate(batches), strict=True)]
        assert list(zip(*columns, strict=True)) == list(dataset)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def iterate(batches: BatchIterator) -> Iterator[Any]:
    """Yield all remaining batches, or raise the first error."""
    while (batch := next(batches, None)) is not None:
        if isinstance(batch, Failure):
            raise batch.restore()
        yield batch


def take(batches: BatchIterator) -> Sequence[int]:
    """Return the next batch as a list, or raise its error."""
    return list(map(int, next(iterate(batches))))


def wait_for(batches: BatchIterator) -> None:
    """Wait until the next batch is ready."""
    deadline = time.monotonic() + DEADLINE_S
    while not batches.is_ready(0.01):
        assert time.monotonic() < deadline, "the next batch never came"


def receive(batches: BatchIterator, *, asks: bool) -> list[Sequence[int]]:
    """Return all remaining batches. With ``asks``, wait until each batch is ready before requesting it."""
    received = list[Sequence[int]]()
    while True:
        if asks and received:  # Some iterators begin the epoch with the first request.
            wait_for(batches)
        try:
            received.append(take(batches))
        except StopIteration:
            return received
