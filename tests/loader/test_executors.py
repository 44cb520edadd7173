"""Every executor's iterators obey the laws, and so do those that the user gets over each executor."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset
from torch.utils.data.datapipes.iter import IterableWrapper

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset, ShardWriter
from shardio.loader.extension import find_extension
from shardio.testing.executor import BATCH_SIZE, NUM_SAMPLES, ExecutorTests, Samples, Start

PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
THREAD: dict[str, Any] = {"num_workers": 1, "worker_method": "thread"}


class Numbers(Dataset[int]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return self.samples(index)


class FromText:
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __call__(self, sample: dict[str, Any]) -> int:
        return self.samples(int(sample["txt"]))


def do_nothing(worker_id: int) -> None:
    pass


def over_shards(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, fields=("txt",), transform_sample=FromText(samples))
    return DataLoader(dataset, BATCH_SIZE, **options)


def sampled(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields=("txt",), transform_sample=FromText(samples))
    return DataLoader(dataset, BATCH_SIZE, **options)


def over_any(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    return DataLoader(Numbers(samples), BATCH_SIZE, **options)


def in_order(packed: Path, samples: Samples, **options: Any) -> DataLoader:
    dataset = Numbers(samples)
    return DataLoader(dataset, BATCH_SIZE, sampler=EpochSampler(dataset, shuffle=False), **options)


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
    "ordered shards": partial(over_shards, worker_init_fn=do_nothing, num_workers=1),
    "ordered shards, threads": partial(over_shards, worker_init_fn=do_nothing, **THREAD),
    "ordered indices, caller": in_order,
    "ordered indices": partial(in_order, num_workers=1),
    "ordered indices, persistent": partial(in_order, **PERSISTENT),
    "torch": from_pipe,
    "torch, workers": partial(from_pipe, num_workers=1),
    "torch, ordered shards": partial(over_shards, **PERSISTENT),
    "torch, ordered indices": partial(in_order, **PERSISTENT),
}
NOT_KNOWING = ("calling process", "fetching, caller", "ordered indices, caller")
"""Those that do not know whether a batch is there, besides torch's."""

CHUNKED = ("ordered shards", "ordered shards, threads")
"""Those that read the samples of several batches together."""


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laws") / "packed"
    with ShardWriter(folder) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:02d}", "txt": str(number)})
    return folder


def start_executors(loader: DataLoader) -> Any:
    extension = find_extension(loader)
    assert extension is not None, "DataLoader's constructor has made it"
    return extension.find_executor(loader).start(*extension._find_start(loader))


def start_users(loader: DataLoader) -> Any:
    loader.set_epoch(0)
    return iter(loader)


class TestExecutors(ExecutorTests):
    """The executors, and the user's iterators over them."""

    @pytest.fixture(params=EXECUTORS)
    def name(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    @pytest.fixture(params=[start_executors, start_users])
    def start(
        self,
        samples: Samples,
        numbers: Path,
        name: str,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Start:
        if name.startswith("torch, ordered"):
            monkeypatch.delattr(os, "memfd_create")  # As outside of Linux.
        loader = list[DataLoader]()  # Made after the test has changed the samples.

        def start() -> Any:
            if not loader:
                loader.append(EXECUTORS[name](numbers, samples))
            return request.param(loader[0])

        return start

    @pytest.fixture
    def survives(self, name: str) -> bool:
        return name not in ("torch", "torch, workers")

    @pytest.fixture
    def knows(self, name: str) -> bool:
        return not name.startswith("torch") and name not in NOT_KNOWING and name not in CHUNKED
