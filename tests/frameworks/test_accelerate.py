"""Accelerate delivers every sample of two epochs once, even in a resumed run.

Splitting the samples a second time raises an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import IterableDatasetShard
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ParallelismConfig
from torch.utils.data import DataLoader as TorchLoader, DistributedSampler, IterableDataset

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset
from shardio.loader.epoch_iterator import find_remainder
from shardio.order import Remainder, Split
from tests.frameworks import with_accelerate
from tests.frameworks.launch import check_epochs, launch, returned
from tests.frameworks.samples import Labeled
from tests.processes import forkserver_context
from tests.raising import assert_raises

SPLITTERS = {
    "torch-shards-dispatch": "DataLoaderDispatcher",
    "torch-shards-dispatch-workers": "DataLoaderDispatcher",
    "torch-shards": "IterableDatasetShard",
    "torch-shards-workers": "IterableDatasetShard",
    "torch-sampler": "BatchSamplerShard",
    "torch-sampler-dispatch": "DataLoaderDispatcher",
}
SKIPPERS = {"skip-shards": "SkipDataLoader", "skip-sampled": "SkipBatchSampler"}


@pytest.fixture
def keys(packed: Path) -> list[str]:
    return list(ShardDataset(packed, fields="key"))


@pytest.mark.slow
def test_two_ranks(packed: Path, tmp_path: Path, keys: list[str]) -> None:
    launch("tests.frameworks.with_accelerate:run", tmp_path, packed)
    first, second = returned(tmp_path, 2)
    assert first["batches"] == second["batches"]
    check_epochs(tmp_path / "2" / "saved", keys, num_epochs=1)  # This run is resumed from Accelerate's checkpoint.
    for kind in with_accelerate.MAKERS:
        expected, length = ([*keys, *Labeled.keys], 4) if kind == "mixed" else (keys, 3)
        for option in with_accelerate.CONFIGURATIONS:  # Each run has two epochs, the second of which is resumed.
            check_epochs(tmp_path / "2" / f"{kind}-{option}", expected)
            assert first["batches"][f"{kind}-{option}"] == length
        for rank in (first, second):
            # Accumulation over two batches ends with the epoch, and metrics are gathered without the padding.
            assert rank[f"sync-{kind}"] == [[number % 2 == 1 or number == length - 1 for number in range(length)]] * 2
            assert sorted(rank[f"metrics-{kind}"]) == sorted(expected)
    # Splitting the samples a second time is an error on all ranks, and so is skipping batches.
    for number, rank in enumerate((first, second)):
        for name, splitter in SPLITTERS.items():
            assert f"{splitter} splits the samples over 2 processes" in rank["errors"][name], name
            assert f"this is rank {number} of 2" in rank["errors"][name]
            assert "Pass the framework a shardio.DataLoader" in rank["errors"][name]
        for name, skipper in SKIPPERS.items():
            assert skipper in rank["errors"][name]
            assert "load_state_dict() on the shardio.DataLoader instead of using skip" in rank["errors"][name]


@pytest.mark.parametrize("strata", [1, 4])
@pytest.mark.parametrize("remainder", get_args(Remainder))
def test_only_repeats_are_removed_from_gathered_metrics(strata: int, remainder: Remainder) -> None:
    """Accelerate concatenates the last batches of the ranks in order, and cuts off the repeats."""
    fixed: Any = {"rank": 0, "strata": strata, "remainder": remainder}
    for num_samples, start, world_size, size in itertools.product((0, 1, 21, 24), (0, 3), range(1, 6), range(1, 5)):
        start = min(start, num_samples)
        first = Split(num_samples=num_samples, start=start, world_size=world_size, batch_size=size, **fixed)
        splits = [replace(first, rank=rank) for rank in range(world_size)]
        last = [split.batch(split.num_batches - 1) for split in splits if split.num_batches]
        gathered = [position for batch in last for position in batch.tolist()]
        kept = find_remainder(first)
        assert {find_remainder(split) for split in splits} == {kept}
        real = [position for position in gathered if position < num_samples]
        assert (gathered[:kept] if kept else gathered) == real


@pytest.fixture
def _one_process() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_one_process")
def test_in_one_process_frameworks_may_wrap_anything(packed: Path, keys: list[str]) -> None:
    accelerator = Accelerator(cpu=True)
    for kind, make in with_accelerate.MAKERS.items():
        loader = make(str(packed))
        assert accelerator.prepare(loader) is loader
        own = Labeled.keys if kind == "mixed" else ()
        assert sorted(key for _, batch in loader for key in batch) == sorted([*keys, *own])
    shards, mapped = ShardDataset(packed, fields="label"), ShardMapDataset(packed, fields="label")
    assert sum(map(len, accelerator.prepare(TorchLoader(shards, 4)))) == 21
    assert sum(map(len, skip_first_batches(TorchLoader(shards, 4), 2))) == 13
    assert sum(map(len, accelerator.prepare(TorchLoader(mapped, 4, sampler=EpochSampler(mapped))))) == 21
    others = DataLoader(mapped, 4)
    assert accelerator.prepare(others) is not others


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("prepare", ["prepare", "prepare_data_loader"])
def test_accelerate_tracks_an_epoch_until_it_ends_or_is_left(packed: Path, prepare: str) -> None:
    accelerator = Accelerator(cpu=True)
    loader = getattr(accelerator, prepare)(with_accelerate.make_shards(str(packed)))
    for _ in loader:
        assert accelerator.gradient_state.in_dataloader
        break
    assert not accelerator.gradient_state.in_dataloader
    ended = iter(loader)
    for _ in ended:
        is_last = accelerator.gradient_state.end_of_dataloader
    assert is_last
    # The loader must not be removed a second time: that fails in older versions of Accelerate.
    with mock.patch.object(GradientState, "_remove_dataloader") as removed:
        assert next(ended, None) is None
        del ended
    assert not removed.called
    assert not accelerator.gradient_state.in_dataloader
    direct = with_accelerate.make_shards(str(packed))
    for _ in direct:  # This loader was not prepared.
        assert not accelerator.gradient_state.in_dataloader


@pytest.mark.parametrize("context", [None, "fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_a_second_split_is_an_error_in_workers_too(packed: Path, context: str | None) -> None:
    if context == "forkserver":
        forkserver_context()
    dataset = ShardDataset(packed, fields="label", rank=1, world_size=2)
    options: dict[str, Any] = {} if context is None else {"num_workers": 1, "multiprocessing_context": context}
    again = IterableDatasetShard(dataset, 4, num_processes=2, process_index=1)
    with pytest.raises(RuntimeError, match="IterableDatasetShard splits the samples over 2 processes"):
        list(TorchLoader(again, 4, **options))
    alone = IterableDatasetShard(ShardDataset(packed, fields="label", rank=0, world_size=1), 4, num_processes=2)
    assert sum(map(len, TorchLoader(alone, 4))) == 12


class Passing(IterableDataset[Any]):
    """A user-defined dataset that wraps another dataset and also has that dataset's attributes."""

    def __init__(self, inner: Any, **attributes: Any) -> None:
        self.__dict__.update(attributes, inner=inner)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def test_unrelated_attributes_are_not_a_second_split(packed: Path) -> None:
    half = ShardDataset(packed, fields="label", rank=0, world_size=2)
    sampler = EpochSampler(range(21), rank=0, world_size=2)
    for around in (Passing(half, num_processes=4), Passing(half, num_processes=lambda: 4), Passing(sampler)):
        assert len(list(around)) == 11


def test_a_distributed_sampler_over_shards_is_an_error(packed: Path) -> None:
    dataset = ShardDataset(packed, rank=0, world_size=2)
    for loader in (DataLoader, TorchLoader):
        with pytest.raises(ValueError, match="expected unspecified sampler option"):
            loader(dataset, sampler=DistributedSampler(dataset, num_replicas=2, rank=0))


@pytest.mark.usefixtures("_one_process")
def test_ranks_that_share_data_need_a_world_of_their_own(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    loaders = [
        accelerator.prepare(DataLoader(ShardDataset(packed, fields="label", rank=0, world_size=world_size), 4))
        for world_size in (1, 2)
    ]
    monkeypatch.setattr(accelerator.state, "parallelism_config", ParallelismConfig(tp_size=2))
    assert sum(map(len, loaders[0])) == 21
    assert_raises(ValueError, r"different shares must be 1\..*world_size=1", lambda: next(iter(loaders[1])))
