"""Stop anywhere, resume anywhere: both parts together are the epoch, each sample once."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch.utils.data

from shardio import DataLoader, DevicePrefetcher, EpochSampler, ShardDataset, ShardMapDataset, StateError
from shardio.order import EpochCounter

ORDER: dict[str, Any] = {"shuffle": True, "remainder": "keep", "rank": 0, "world_size": 1}


def make_loader(packed: Path, *, batch_size: int = 4, order: Any = ORDER, **options: Any) -> DataLoader:
    return DataLoader(ShardDataset(packed, fields="key", **order), batch_size, **options)


def make_sampled(packed: Path, *, batch_size: int = 4, order: Any = ORDER, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields="key")
    return DataLoader(dataset, batch_size, sampler=EpochSampler(dataset, **order), **options)


both_kinds = pytest.mark.parametrize("make", [make_loader, make_sampled])


def keys_of(batches: Any, epoch: int | None = None) -> list[str]:
    if epoch is not None:
        batches.set_epoch(epoch)
    return [key for batch in batches for key in batch]


def where(loader: Any) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["position"]


def resume(make: Any, packed: Path, state: Any, **options: Any) -> DataLoader:
    loader: DataLoader = make(packed, **options)
    loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


@both_kinds
@pytest.mark.parametrize(("num_batches", "num_workers"), [(0, 0), (3, 0), (5, 0), (6, 0), (3, 1)])
def test_resumed_equals_uninterrupted(make: Any, packed: Path, num_batches: int, num_workers: int) -> None:
    uninterrupted = keys_of(make(packed))
    loader = make(packed, num_workers=num_workers)
    before = keys_of(islice(loader, num_batches))
    assert where(loader) == (0, min(4 * num_batches, 21)), "what was received counts, not what was prefetched"
    resumed = resume(make, packed, loader.state_dict(), num_workers=num_workers)
    resumed.set_epoch(0)
    assert resumed.state_dict() == loader.state_dict()
    assert len(resumed) == len(loader) == 6
    assert before + keys_of(resumed) == uninterrupted
    # The epoch after it is the next one, as usual, also if the loaded one is over.
    assert keys_of(resumed) == keys_of(make(packed), 1)
    assert keys_of(resume(make, packed, resumed.state_dict())) == keys_of(make(packed), 2)


@both_kinds
@pytest.mark.parametrize(("old", "new"), [((1, 4), (3, 2)), ((2, 3), (1, 5)), ((3, 2), (2, 4))])
def test_resuming_on_other_ranks_delivers_the_rest_once(
    make: Any, packed: Path, old: tuple[int, int], new: tuple[int, int]
) -> None:
    delivered, states = Counter[str](), list[Any]()
    for (world_size, batch_size), is_resumed in ((old, False), (new, True)):
        for rank in range(world_size):
            order = {**ORDER, "rank": rank, "world_size": world_size}
            loader = make(packed, order=order, batch_size=batch_size)
            if is_resumed:
                loader.load_state_dict(states[0])
                loader.set_epoch(0)
            delivered.update(keys_of(islice(loader, None if is_resumed else 2)))
            states.append(loader.state_dict())
        assert all(state == states[0] for state in states[: old[0]])
    assert set(delivered.values()) == {1}
    assert len(delivered) == 21


@both_kinds
def test_break_consumes_an_epoch_and_another_epoch_drops_the_position(make: Any, packed: Path) -> None:
    loader = make(packed, num_workers=1, persistent_workers=True)
    for _ in loader:
        break
    assert where(loader) == (0, 4)
    assert keys_of(loader) == keys_of(make(packed), 1)
    other = resume(make, packed, {**loader.state_dict(), "position": 8})
    other.set_epoch(2)
    assert where(other) == (2, 0)
    assert len(keys_of(other)) == 21
    with pytest.raises(StateError, match=r"order\.seed is 0 in the state and 1 here"):
        resume(make, packed, loader.state_dict(), order={**ORDER, "seed": 1})


@both_kinds
@pytest.mark.parametrize("num_workers", [0, 1])
def test_setting_the_next_epoch_does_not_change_the_one_in_flight(make: Any, packed: Path, num_workers: int) -> None:
    loader = make(packed, num_workers=num_workers, persistent_workers=num_workers > 0)
    iterator = iter(loader)
    keys_of(islice(iterator, 2))
    loader.set_epoch(5)
    assert where(loader) == (0, 8)
    assert keys_of(resume(make, packed, loader.state_dict())) == keys_of(iterator)
    assert where(loader) == (5, 0)
    assert keys_of(loader) == keys_of(make(packed), 5)


def test_an_epoch_is_an_integer_below_the_limit_wherever_it_is_set(packed: Path) -> None:
    mapped, loader = ShardMapDataset(packed, fields="key"), make_loader(packed)
    plain = torch.utils.data.DataLoader(mapped, sampler=EpochSampler(mapped))
    owners: list[Any] = [EpochCounter(), ShardDataset(packed), mapped, EpochSampler(mapped), loader, DataLoader(mapped)]
    owners += [make_sampled(packed), DataLoader(range(3), sampler=EpochSampler(range(3)))]
    for owner in (*owners, DevicePrefetcher(loader, "cpu"), DevicePrefetcher(plain, "cpu")):
        for epoch, error in ((1.5, TypeError), ("a", TypeError), (None, TypeError), (-1, ValueError)):
            with pytest.raises(error, match="epoch must be"):
                owner.set_epoch(epoch)
        for epoch in (2**62, 10**20):
            with pytest.raises(ValueError, match=r"epoch must be at least 0 and below 2\*\*62"):
                owner.set_epoch(epoch)
        owner.set_epoch(np.int64(2**62 - 1))
    assert len(keys_of(loader)) == len(keys_of(loader))  # The epoch after the last one that can be set works, too.
    with pytest.raises(StateError, match=r"epoch .* below 2\*\*62, got 1"):
        loader.load_state_dict({**loader.state_dict(), "epoch": 10**20})
    loader.set_epoch(cast(int, np.int64(3)))
    assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 3


def test_the_samplers_own_set_epoch_and_state_count_too(packed: Path) -> None:
    loader = make_sampled(packed)
    before = keys_of(islice(loader, 2))
    resumed = resume(make_sampled, packed, loader.state_dict())
    assert isinstance(resumed.sampler, EpochSampler)
    resumed.sampler.set_epoch(0)  # As frameworks do that do not know the loader's.
    assert before + keys_of(resumed) == keys_of(make_sampled(packed))


@both_kinds
@pytest.mark.parametrize("is_fast", [False, True])
def test_an_epoch_that_cannot_be_started_is_not_counted(
    make: Any, is_fast: bool, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(packed) if is_fast else make(packed, worker_init_fn=id)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "position": 4})

    def fail(*_: object, **__: object) -> Any:
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("shardio.loader.any_dataset.Fetching.start", fail)
        patched.setattr("shardio.loader.pipeline.CallingProcess.start", fail)
        patched.setattr("shardio.loader.pipeline.WorkerProcesses.start", fail)
        with pytest.raises(OSError, match="no memory"):
            iter(loader)
    assert where(loader) == (3, 4)
    assert keys_of(loader) == keys_of(make(packed), 3)[4:]
    sampler = EpochSampler(ShardMapDataset(packed))
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 4})
    with monkeypatch.context() as patched:
        patched.setenv("RANK", "1")  # Of how many?
        with pytest.raises(ValueError, match="WORLD_SIZE"):
            iter(sampler)
    assert where(sampler) == (3, 4)


def test_epochs_without_batches_are_warned_of_once(packed: Path) -> None:
    """The dataset has 21 samples."""
    mapped = ShardMapDataset(packed)
    dropping: list[dict[str, Any]] = [
        {"dataset": ShardDataset(packed)},
        {"dataset": mapped, "sampler": EpochSampler(mapped)},
        {"dataset": mapped},
        {"dataset": mapped, "worker_init_fn": print},
    ]
    words = r"no batches: the 21 samples do not fill a batch on every rank .22 samples"
    for options in dropping:
        loader = DataLoader(batch_size=22, drop_last=True, **options)
        with pytest.warns(RuntimeWarning, match=words) as warned:
            assert list(loader) == []
        assert warned[0].filename == __file__
        assert list(loader) == []  # Warnings are errors in these tests.
    shares = [ShardDataset(packed, remainder="keep", rank=rank, world_size=22) for rank in (0, 21)]
    assert len(list(DataLoader(shares[0]))) == 1
    with pytest.warns(RuntimeWarning, match="no batches: rank 21 of 22 gets none of the 21 samples: use fewer ranks"):
        assert list(DataLoader(shares[1])) == []


def test_the_rest_of_an_epoch_may_have_no_batches(packed: Path) -> None:
    loader = DataLoader(ShardDataset(packed), batch_size=20, drop_last=True)
    next(iter(loader))
    loader.load_state_dict({**loader.state_dict(), "position": 20})
    assert list(loader) == []


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_a_dataset_keeps_the_epoch_that_was_set(packed: Path, duplicate: Callable[[Any], Any]) -> None:
    dataset = ShardDataset(packed, fields="key", shuffle=True)
    dataset.set_epoch(3)
    loader, of_copy = DataLoader(dataset, batch_size=4), DataLoader(duplicate(dataset), batch_size=4)
    for each in (loader, of_copy):
        assert keys_of(each) == keys_of(DataLoader(ShardDataset(packed, fields="key", shuffle=True), 4), 3)
        assert where(each) == (3, 21)
