"""in_groups over any loader with a state: at the end of a group, the state is that of the batches yielded so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset, StreamDataset, check
from shardio.train import in_groups
from tests.device.late_stream import prefetch_late

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata calls it in torch.
    pytest.mark.filterwarnings("ignore:.* has no state_dict, so resuming reads"),
]

BATCH_SIZE, NUM_BATCHES = 5, 5
"""21 samples make five batches, the last of which has one."""


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        assert (info := get_worker_info()) is None or info.num_workers == 1
        return iter(range(21))


class Counted(Numbers):
    def __init__(self) -> None:
        self.num_yielded = 0

    def __iter__(self) -> Iterator[int]:
        first, self.num_yielded = self.num_yielded, 0
        for number in range(first, 21):
            self.num_yielded = number + 1
            yield number
        self.num_yielded = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_yielded = state["num_yielded"]


NUMBERS: Any = range(21)


def make_sampled(packed: Path) -> tuple[Any, dict[str, Any]]:
    dataset = ShardMapDataset(packed, fields="key")
    return dataset, {"sampler": EpochSampler(dataset)}


KINDS: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "ShardDataset": lambda packed: (ShardDataset(packed, fields="key", shuffle=True), {}),
    "EpochSampler": make_sampled,
    "ShardMapDataset": lambda packed: (ShardMapDataset(packed, fields="key"), {"shuffle": True}),
    "StreamDataset": lambda packed: (StreamDataset(sorted(packed.glob("*.tar")), fields="key", shuffle=True), {}),
    "map": lambda _: (range(21), {"shuffle": True}),
    "DistributedSampler": lambda _: (NUMBERS, {"sampler": DistributedSampler(NUMBERS, num_replicas=1, rank=0)}),
    "iterable": lambda _: (Numbers(), {}),
    "iterable with a state": lambda _: (Counted(), {}),
}
"""Datasets, and the arguments of their loaders."""


WRAPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda loader: loader,
    "guarded": lambda loader: check.guard(loader, key=list),
    "prefetched on the CPU": lambda loader: DevicePrefetcher(loader, "cpu"),
    "prefetched": lambda loader: prefetch_late(loader, depth=3)[0],
}


def describe(batches: Any) -> list[list[Any]]:
    return [batch.tolist() if isinstance(batch, torch.Tensor) else list(batch) for batch in batches]


def assert_groups_resume(make: Callable[[], Any], size: int) -> None:
    """Check the state at the end of each group of an epoch. ``make`` returns a new loader, or a wrapper of one."""
    loader, received, ends = make(), list[Any](), list[int]()
    states = list[Any]()
    for batch, ends_group in in_groups(loader, size):
        received += describe([batch])
        if ends_group:
            ends.append(len(received))
            states.append(loader.state_dict())
    assert ends == [*range(size, NUM_BATCHES, size), NUM_BATCHES]
    for end, state in zip(ends, states, strict=True):
        resumed = make()
        resumed.load_state_dict(state)
        if not isinstance(getattr(resumed, "loader", resumed), StatefulDataLoader):
            resumed.set_epoch(0)  # Otherwise, shardio's order begins the next epoch after the last batch.
        assert describe(resumed) == received[end:]


@pytest.mark.parametrize(
    ("kind", "wrap", "loader"),
    [
        *((kind, wrap, DataLoader) for kind in KINDS for wrap in WRAPS),
        # It counts what it is asked for.
        *((kind, wrap, StatefulDataLoader) for kind in ("map", "iterable with a state") for wrap in list(WRAPS)[2:]),
    ],
)
def test_a_loader_resumes_after_any_group(packed: Path, kind: str, wrap: str, loader: Any) -> None:
    def make() -> Any:
        dataset, options = KINDS[kind](packed)
        return WRAPS[wrap](loader(dataset, BATCH_SIZE, **options))

    for size in (1, 2, 3, 7):
        assert_groups_resume(make, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method", "wrap"),
    [
        *((kind, method, "plain") for kind in KINDS for method in ("multiprocessing", "thread")),
        *((kind, "multiprocessing", "prefetched") for kind in ("map", "iterable with a state")),
    ],
)
def test_a_loader_with_workers_resumes_after_any_group(packed: Path, kind: str, method: Any, wrap: str) -> None:
    def make() -> Any:
        dataset, options = KINDS[kind](packed)
        return WRAPS[wrap](DataLoader(dataset, BATCH_SIZE, num_workers=1, worker_method=method, **options))

    assert_groups_resume(make, 2)
