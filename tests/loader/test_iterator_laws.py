"""Every executor's iterators obey the laws, and so do those that the user gets over each executor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset
from torch.utils.data.datapipes.iter import IterableWrapper

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset, ShardWriter
from shardio.loader.extension import find_extension
from tests.faults.worker_processes import wait_until
from tests.loader.iterator_laws import check_failure, check_iterator, check_waiting

NUM_SAMPLES, BATCH_SIZE = 12, 3
WHOLE = [list(range(start, start + BATCH_SIZE)) for start in range(0, NUM_SAMPLES, BATCH_SIZE)]
PERSISTENT: dict[str, Any] = {"num_workers": 1, "persistent_workers": True}
THREAD: dict[str, Any] = {"num_workers": 1, "worker_method": "thread"}


class Gate:
    """A user's function, called with each sample: some fail, or wait for a file. It works in any process."""

    def __init__(self, path: Path, *, fails: int = -1, waits: int = NUM_SAMPLES) -> None:
        self.path, self.fails, self.waits = path, fails, waits

    def __call__(self, number: int) -> int:
        if number == self.fails:
            raise LookupError(number)
        if number >= self.waits:
            wait_until(self.path.exists, "the file is there")
        return number

    def transform(self, sample: dict[str, Any]) -> int:
        return self(int(sample["txt"]))


class Numbers(Dataset[int]):
    """The numbers, each of which passes a gate."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> int:
        return self.gate(index)


def do_nothing(worker_id: int) -> None:
    pass


def over_shards(packed: Path, gate: Gate, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, fields=("txt",), transform_sample=gate.transform)
    return DataLoader(dataset, BATCH_SIZE, **options)


def sampled(packed: Path, gate: Gate, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields=("txt",), transform_sample=gate.transform)
    return DataLoader(dataset, BATCH_SIZE, **options)


def over_any(packed: Path, gate: Gate, **options: Any) -> DataLoader:
    return DataLoader(Numbers(gate), BATCH_SIZE, **options)


def in_order(packed: Path, gate: Gate, **options: Any) -> DataLoader:
    dataset = Numbers(gate)
    return DataLoader(dataset, BATCH_SIZE, sampler=EpochSampler(dataset, shuffle=False), **options)


def from_pipe(packed: Path, gate: Gate, **options: Any) -> DataLoader:
    return DataLoader(IterableWrapper(range(NUM_SAMPLES)).map(gate), BATCH_SIZE, **options)


Make = Callable[[Path, Gate], DataLoader]

EXECUTORS: dict[str, Make] = {
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
    "ordered indices": partial(in_order, num_workers=1),
    "ordered indices, persistent": partial(in_order, **PERSISTENT),
    "torch": from_pipe,
    "torch, workers": partial(from_pipe, num_workers=1),
}
NOT_TELLING = ("calling process", "fetching, caller", "torch", "torch, workers")
"""Those that cannot tell whether a batch is there."""

CHUNKED = ("ordered shards", "ordered shards, threads")
"""Those that read the samples of several batches together."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laws") / "packed"
    with ShardWriter(folder) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"__key__": f"{number:02d}", "txt": str(number)})
    return folder


def start_executors(loader: DataLoader) -> Any:
    """Begin an epoch and return the executor's iterator."""
    extension = find_extension(loader)
    assert extension is not None, "DataLoader's constructor has made it"
    return extension.find_executor(loader).start(*extension._find_start(loader))


def start_users(loader: DataLoader) -> Any:
    """Begin the first epoch and return the user's iterator."""
    loader.set_epoch(0)
    return iter(loader)


def plain(batch: Any) -> Any:
    return batch.tolist()


@pytest.mark.parametrize("start", [start_executors, start_users])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_iterator_delivers_its_epoch_and_can_be_left(
    packed: Path, tmp_path: Path, executor: str, start: Any
) -> None:
    loader = EXECUTORS[executor](packed, Gate(tmp_path))
    check_iterator(partial(start, loader), WHOLE, plain)


@pytest.mark.parametrize("executor", [name for name in EXECUTORS if not name.startswith("torch")])
def test_a_batch_that_fails_is_one_batch(packed: Path, tmp_path: Path, executor: str) -> None:
    loader = EXECUTORS[executor](packed, Gate(tmp_path, fails=4))
    for start in (start_executors, start_users):
        check_failure(partial(start, loader), LookupError, [WHOLE[0], None, *WHOLE[2:]], plain)


@pytest.mark.parametrize("executor", sorted(set(EXECUTORS).difference(NOT_TELLING, CHUNKED)))
def test_an_iterator_tells_whether_its_next_batch_is_there(packed: Path, tmp_path: Path, executor: str) -> None:
    path = tmp_path / "open"
    loader = EXECUTORS[executor](packed, Gate(path, waits=BATCH_SIZE))
    check_waiting(partial(start_users, loader), path.touch, WHOLE, plain)
