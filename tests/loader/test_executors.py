"""The iterators of every executor, and the user's iterators over them, obey the laws."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.loader.any_dataset import Fetching
from shardio.loader.executor import Executor
from shardio.loader.extension import find_extension
from shardio.loader.pipeline import WorkerProcesses
from shardio.testing.executor import (
    BATCH_SIZE,
    NUM_SAMPLES,
    ExecutorParts,
    ExecutorTests,
    FromText,
    MakeExecutor,
    Samples,
    Start,
    write_samples,
)
from tests.loader.programs import CALLING, Called

PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
THREAD: dict[str, Any] = {"num_workers": 1, "worker_method": "thread"}


def over_shards(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, fields=("txt",), transform_sample=FromText(samples))
    return DataLoader(dataset, BATCH_SIZE, **options)


def sampled(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields=("txt",), transform_sample=FromText(samples))
    return DataLoader(dataset, BATCH_SIZE, **options)


def over_any(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    return DataLoader(Called(samples, NUM_SAMPLES), BATCH_SIZE, **options)


def in_order(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    return over_any(packed, samples, sampler=EpochSampler(range(NUM_SAMPLES), shuffle=False), **options)


def from_pipe(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    return DataLoader(IterableWrapper(range(NUM_SAMPLES)).map(samples), BATCH_SIZE, **options)


EXECUTORS: dict[str, Callable[[Path, Samples], DataLoader]] = {
    "calling process": over_shards,
    "worker processes": partial(over_shards, num_workers=1),
    "worker processes, persistent": partial(over_shards, **PERSISTENT),
    "sampled": partial(sampled, num_workers=1),
    "fetching, caller": over_any,
    "fetching, processes": partial(over_any, num_workers=1),
    "fetching, persistent": partial(over_any, **PERSISTENT),
    "fetching, threads": partial(over_any, **THREAD),
    "ordered shards": partial(over_shards, **CALLING, num_workers=1),
    "ordered shards, threads": partial(over_shards, **CALLING, **THREAD),
    "ordered indices, caller": in_order,
    "ordered indices": partial(in_order, num_workers=1),
    "ordered indices, persistent": partial(in_order, **PERSISTENT),
    "torch": from_pipe,
    "torch, workers": partial(from_pipe, num_workers=1),
    "torch, ordered shards": partial(over_shards, **PERSISTENT),
    "torch, ordered indices": partial(in_order, **PERSISTENT),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "calling process": {"num_workers": 0},
    "worker processes": {"num_workers": 2},
    "worker processes, persistent": {**PERSISTENT, "num_workers": 2},
    "ordered shards": {**CALLING, "num_workers": 2},
    "ordered shards, threads": {**CALLING, **THREAD},  # Threads would share generators.
}
"""The options with which a loader of a ShardDataset chooses each executor."""

NOT_KNOWING = ("calling process", "fetching, caller", "ordered indices, caller")
"""The executors, other than torch's, that cannot tell whether a batch is ready."""

CHUNKED = ("ordered shards", "ordered shards, threads")
"""The executors that read the samples of several batches together."""


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("laws") / "packed")


class TestExecutors(ExecutorTests):
    """The executors."""

    @pytest.fixture(params=EXECUTORS)
    def name(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    @pytest.fixture
    def loader(self, samples: Samples, numbers: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> DataLoader:
        if name.startswith("torch, ordered"):
            monkeypatch.delattr(os, "memfd_create")  # As on systems other than Linux.
        return EXECUTORS[name](numbers, samples)

    @pytest.fixture
    def options(self, name: str) -> dict[str, Any]:
        if name not in OPTIONS:
            pytest.skip("its loaders do not read a ShardDataset, or another test covers its executor")
        return OPTIONS[name]

    @pytest.fixture
    def make_executor(self) -> MakeExecutor:
        def make(parts: ExecutorParts) -> Executor:
            extension = find_extension(parts.loader)
            assert extension is not None, "DataLoader's constructor has made it"
            return extension.find_executor(parts.loader)

        return make

    @pytest.fixture
    def survives(self, name: str) -> bool:
        return name not in ("torch", "torch, workers")

    @pytest.fixture
    def knows(self, name: str) -> bool:
        return not name.startswith("torch") and name not in NOT_KNOWING and name not in CHUNKED


class TestIterators(TestExecutors):
    """The user's iterators over the executors."""

    @pytest.fixture
    def start(self, loader: DataLoader) -> Start:
        def start() -> Any:
            loader.set_epoch(0)
            return iter(loader)

        return start

    @pytest.fixture
    def takes_split(self) -> bool:
        return False

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        pytest.skip("TestExecutors tests the executors themselves")


class TestParts(ExecutorTests):
    """Executors that are made from the suite's parts."""

    @pytest.fixture(params=["read", "fetched"])
    def make_executor(self, request: pytest.FixtureRequest) -> MakeExecutor:
        if request.param == "fetched":
            return lambda parts: Fetching(parts.settings, parts.source, parts.bad_samples)
        return lambda parts: WorkerProcesses(
            parts.planner, parts.batches, [], timeout_s=parts.settings.timeout_s, closes_workers=True
        )

    @pytest.fixture
    def knows(self, executor: Executor) -> bool:
        # Fetching reads the samples of several batches together, so it cannot tell whether the next batch is ready.
        return isinstance(executor, WorkerProcesses)
