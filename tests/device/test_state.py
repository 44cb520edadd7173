"""While a prefetcher iterates, the loader's state counts the batches that the user received, not those in flight.

A random transform on the device draws the same numbers for a batch in a resumed run. The copy stream is simulated, and
may delay its work for as long as CUDA is allowed to.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset, check
from tests.device.late_stream import prefetch_late

BATCH_SIZE = 3
NUM_BATCHES = 7
FIELDS = ("label", "key")


def make_sharded(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, fields=FIELDS, shuffle=True)
    return DataLoader(dataset, **{"batch_size": BATCH_SIZE, **options})


def make_sampled(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields=FIELDS)
    return DataLoader(dataset, sampler=EpochSampler(dataset), **{"batch_size": BATCH_SIZE, **options})


def late(loader: Iterable[Any], depth: int) -> DevicePrefetcher:
    return prefetch_late(loader, depth=depth)[0]


class PassedOn:
    """A user-defined wrapper, without support for prefetchers, around a loader."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


WRAPS: dict[str, Callable[[Any], Any]] = {
    **{f"depth {depth}": lambda loader, depth=depth: late(loader, depth) for depth in (1, 2, 3)},  # type: ignore[misc]
    "on the CPU": lambda loader: DevicePrefetcher(loader, "cpu"),
    "around a guard": lambda loader: late(check.guard(loader, key=1), 2),
    "in a guard": lambda loader: check.guard(late(loader, 2), key=1),
    "in another prefetcher": lambda loader: late(late(loader, 2), 3),
    "around a user-defined wrapper": lambda loader: late(PassedOn(loader), 2),
    "in a user-defined wrapper": lambda loader: PassedOn(late(loader, 2)),
}


def keys_of(batches: Iterable[Any]) -> list[str]:
    return [key for _, keys in batches for key in keys]


@pytest.mark.parametrize(
    ("make", "wrap"),
    [*((make_sharded, wrap) for wrap in WRAPS), (make_sampled, "depth 3"), (make_sampled, "in another prefetcher")],
)
def test_resumed_from_the_loaders_state_equals_uninterrupted(make: Any, packed: Path, wrap: str) -> None:
    whole = keys_of(make(packed))
    for stop in range(NUM_BATCHES + 1):
        loader = make(packed)
        batches = iter(WRAPS[wrap](loader))
        before = keys_of(islice(batches, stop))
        state = loader.state_dict()
        assert state["position"] == len(before)
        resumed = make(packed)
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        assert before + keys_of(WRAPS[wrap](resumed)) == whole
        del batches
        assert loader.state_dict() == state, "batches in flight never arrived"


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_several_epochs_left_anywhere(packed: Path, num_workers: int) -> None:
    loader = make_sharded(packed, num_workers=num_workers, persistent_workers=num_workers > 0)
    prefetcher = late(loader, 3)
    for epoch, stop in enumerate((2, NUM_BATCHES, 1, NUM_BATCHES + 1, 4)):
        received = keys_of(islice(prefetcher, stop))
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (epoch, len(received))
        assert prefetcher.state_dict() == state
        resumed, twin = make_sharded(packed), make_sharded(packed)
        resumed.load_state_dict(state)
        for each in (resumed, twin):
            each.set_epoch(epoch)
        assert received + keys_of(resumed) == keys_of(twin)


def test_an_epoch_sampler_in_torchs_own_loader_counts_the_same(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields=FIELDS)
    sampler = EpochSampler(dataset)
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    for number, _ in enumerate(late(loader, 3), 1):
        assert sampler.state_dict()["position"] == min(number * BATCH_SIZE, 21)


def draw(batch: Any, *, generator: torch.Generator) -> Any:
    return batch, int(torch.randint(1 << 40, (), generator=generator))


def make_drawing(packed: Path, *, is_late: bool = False, of_dataset: Any = (), **options: Any) -> DevicePrefetcher:
    loader = DataLoader(ShardDataset(packed, fields="key", shuffle=True, **dict(of_dataset)), 4, **options)
    if is_late:
        return prefetch_late(loader, depth=3, transform=draw)[0]
    return DevicePrefetcher(loader, "cpu", transform=draw)


@pytest.mark.parametrize(
    ("is_late", "checks", "num_workers"),
    [(False, False, 0), (False, True, 0), (True, True, 0), pytest.param(True, False, 1, marks=pytest.mark.slow)],
)
def test_a_resumed_run_draws_the_same(packed: Path, is_late: bool, checks: bool, num_workers: int) -> None:
    options: dict[str, Any] = {"is_late": is_late, "check_duplicates": checks}
    prefetcher = make_drawing(packed, **options)
    epochs = [list(prefetcher) for _ in range(3)]
    drawn = [number for epoch in epochs for _, number in epoch]
    assert len(set(drawn)) == len(drawn) == 18
    begun = make_drawing(packed, **options)
    batches = iter(begun)
    first = [next(batches) for _ in range(2)]
    resumed = make_drawing(packed, num_workers=num_workers, **options)
    resumed.load_state_dict(begun.state_dict())
    assert [*first, *resumed, *resumed] == [*epochs[0], *epochs[1]]


def test_ranks_and_seeds_draw_different_numbers(packed: Path) -> None:
    """Without shardio's order, the global generator seeds the transforms."""
    every: list[dict[str, Any]] = [{"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}, {"seed": 1}]
    drawn = [number for options in every for _, number in make_drawing(packed, of_dataset=options)]
    assert len(set(drawn)) == len(drawn)

    def run() -> list[Any]:
        torch.manual_seed(3)
        return [number for _, number in DevicePrefetcher([1, 2, 3], "cpu", transform=draw)]

    assert run() == run()
    assert len(set(run())) == 3


def test_modules_receive_the_generator_and_functions_without_one_do_not(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "forward", lambda self, batch, *, generator: draw(batch, generator=generator))
    loader = DataLoader(ShardDataset(packed, fields="key", shuffle=True), 4)
    assert list(DevicePrefetcher(loader, "cpu", transform=torch.nn.Module())) == list(make_drawing(packed))
    assert list(DevicePrefetcher([torch.tensor(1)], "cpu", transform=torch.neg)) == [torch.tensor(-1)]


@pytest.mark.parametrize("persistent_workers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_prefetcher_that_is_dropped_frees_its_loader(packed: Path, persistent_workers: bool) -> None:
    prefetcher = make_drawing(packed, num_workers=1, persistent_workers=persistent_workers, is_late=True)
    loader = weakref.ref(prefetcher.loader)
    batches = iter(prefetcher)
    next(batches)
    del prefetcher, batches
    gc.collect()
    assert loader() is None
