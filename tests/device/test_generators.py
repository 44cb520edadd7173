"""A random transform on the device draws the same for a batch, however the run got there."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from shardio import DataLoader, DevicePrefetcher, ShardDataset
from tests.device.late_stream import prefetch_late


def draw(batch: Any, *, generator: torch.Generator) -> Any:
    return batch, int(torch.randint(1 << 40, (), generator=generator))


def make(packed: Path, *, is_late: bool = False, **options: Any) -> DevicePrefetcher:
    dataset_options = {name: options.pop(name) for name in ("rank", "world_size", "seed") if name in options}
    dataset = ShardDataset(packed, fields="key", shuffle=True, **dataset_options)
    loader = DataLoader(dataset, 4, **options)
    if is_late:
        return prefetch_late(loader, depth=3, transform=draw)[0]
    return DevicePrefetcher(loader, "cpu", transform=draw)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("checks", [False, True])
def test_a_resumed_run_draws_the_same(packed: Path, is_late: bool, checks: bool) -> None:
    options: dict[str, Any] = {"is_late": is_late, "check_duplicates": checks}
    prefetcher = make(packed, **options)
    epochs = [list(prefetcher) for _ in range(3)]
    drawn = [number for epoch in epochs for _, number in epoch]
    assert len(set(drawn)) == len(drawn) == 18
    begun = make(packed, **options)
    batches = iter(begun)
    first = [next(batches) for _ in range(2)]
    resumed = make(packed, num_workers=1, **options)
    resumed.load_state_dict(begun.state_dict())
    assert [*first, *resumed, *resumed] == [*epochs[0], *epochs[1]]


def test_ranks_and_seeds_draw_different_numbers(packed: Path) -> None:
    every: list[dict[str, Any]] = [{"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2}, {"seed": 1}]
    drawn = [number for options in every for _, number in make(packed, **options)]
    assert len(set(drawn)) == len(drawn)


def test_without_shardios_order_the_global_generator_seeds_it() -> None:
    def run() -> list[Any]:
        torch.manual_seed(3)
        return [number for _, number in DevicePrefetcher([1, 2, 3], "cpu", transform=draw)]

    assert run() == run()
    assert len(set(run())) == 3


class Drawing(torch.nn.Module):
    def forward(self, batch: Any, *, generator: torch.Generator) -> Any:
        return draw(batch, generator=generator)


def test_modules_receive_the_generator_as_well(packed: Path) -> None:
    dataset = ShardDataset(packed, fields="key", shuffle=True)
    assert list(DevicePrefetcher(DataLoader(dataset, 4), "cpu", transform=Drawing())) == list(make(packed))


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_prefetcher_that_is_dropped_frees_its_loader(packed: Path, persistent_workers: bool) -> None:
    """Although the loader told it the rng key of a batch that it never received."""
    prefetcher = make(packed, num_workers=1, persistent_workers=persistent_workers, is_late=True)
    loader = weakref.ref(prefetcher.loader)
    batches = iter(prefetcher)
    next(batches)
    del prefetcher, batches
    gc.collect()
    assert loader() is None


def test_a_transform_without_a_generator_gets_none() -> None:
    assert list(DevicePrefetcher([torch.tensor(1)], "cpu", transform=torch.neg)) == [torch.tensor(-1)]
