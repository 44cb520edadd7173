"""Stop anywhere, resume anywhere: both parts together are the epoch, each sample once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from shardio import DataLoader, EpochSampler, ShardDataset, ShardMapDataset, StateError


def make_loader(packed: Path, *, rank: int = 0, world_size: int = 1, seed: int = 0, **options: Any) -> DataLoader:
    dataset = ShardDataset(
        packed, fields="key", shuffle=True, seed=seed, remainder="keep", rank=rank, world_size=world_size
    )
    return DataLoader(dataset, **{"batch_size": 4, **options})


def make_sampled(packed: Path, *, rank: int = 0, world_size: int = 1, seed: int = 0, **options: Any) -> DataLoader:
    dataset = ShardMapDataset(packed, fields="key")
    sampler = EpochSampler(dataset, seed=seed, remainder="keep", rank=rank, world_size=world_size)
    return DataLoader(dataset, sampler=sampler, **{"batch_size": 4, **options})


KINDS = [make_loader, make_sampled]


def keys_of(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    ("num_batches", "workers_before", "workers_after"),
    [*((num_batches, 0, 0) for num_batches in (0, 1, 3, 5, 6)), (3, 1, 1)],
)
def test_resumed_equals_uninterrupted(
    make: Any, packed: Path, num_batches: int, workers_before: int, workers_after: int
) -> None:
    uninterrupted = keys_of(make(packed))
    loader = make(packed, num_workers=workers_before)
    before = keys_of(islice(loader, num_batches))
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make(packed, num_workers=workers_after)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert resumed.state_dict() == state
    assert before + keys_of(resumed) == uninterrupted
    # The epoch after it is the next one, as usual.
    expected = make(packed)
    expected.set_epoch(1)
    assert keys_of(resumed) == keys_of(expected)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(("old", "new"), [((1, 4), (3, 2)), ((2, 3), (1, 5)), ((3, 2), (2, 4))])
def test_resuming_on_other_ranks_delivers_the_rest_once(
    make: Any, packed: Path, old: tuple[int, int], new: tuple[int, int]
) -> None:
    (old_world, old_batch), (new_world, new_batch) = old, new
    delivered, states = Counter[str](), []
    for rank in range(old_world):
        loader = make(packed, rank=rank, world_size=old_world, batch_size=old_batch)
        delivered.update(keys_of(islice(loader, 2)))
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    for rank in range(new_world):
        loader = make(packed, rank=rank, world_size=new_world, batch_size=new_batch)
        loader.load_state_dict(states[0])
        loader.set_epoch(0)
        delivered.update(keys_of(loader))
    assert set(delivered.values()) == {1}
    assert len(delivered) == 21


@pytest.mark.parametrize("make", KINDS)
def test_a_state_counts_what_was_received_not_what_was_prefetched(make: Any, packed: Path) -> None:
    loader = make(packed, num_workers=1, prefetch_factor=3)
    iterator = iter(loader)
    positions = [loader.state_dict()["position"]]
    for _ in range(6):
        next(iterator)
        positions.append(loader.state_dict()["position"])
    assert positions == [0, 4, 8, 12, 16, 20, 21]


@pytest.mark.parametrize("make", KINDS)
def test_at_the_end_the_state_is_the_end_and_the_next_epoch_follows(make: Any, packed: Path) -> None:
    loader = make(packed)
    keys_of(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 21)
    rest = make(packed)
    rest.load_state_dict(state)
    rest.set_epoch(0)
    assert keys_of(rest) == []
    after = make(packed)
    after.load_state_dict(state)
    expected = make(packed)
    expected.set_epoch(1)
    assert keys_of(after) == keys_of(expected)


@pytest.mark.parametrize("make", KINDS)
def test_break_consumes_an_epoch_and_another_epoch_drops_the_position(make: Any, packed: Path) -> None:
    loader = make(packed, num_workers=1, persistent_workers=True)
    for _ in loader:
        break
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 4)
    second = keys_of(loader)
    assert len(second) == 21
    fresh = make(packed)
    fresh.set_epoch(1)
    assert keys_of(fresh) == second
    state = loader.state_dict()
    other = make(packed)
    other.load_state_dict({**state, "position": 8})
    other.set_epoch(2)
    assert (other.state_dict()["epoch"], other.state_dict()["position"]) == (2, 0)
    assert len(keys_of(other)) == 21


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_setting_the_next_epoch_does_not_change_the_one_in_flight(make: Any, packed: Path, num_workers: int) -> None:
    loader = make(packed, num_workers=num_workers, persistent_workers=num_workers > 0)
    iterator = iter(loader)
    before = keys_of(islice(iterator, 2))
    loader.set_epoch(5)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (0, 8)
    resumed = make(packed)
    resumed.load_state_dict(state)
    assert before + keys_of(resumed) == before + keys_of(iterator)
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (5, 0)
    expected = make(packed)
    expected.set_epoch(5)
    assert keys_of(loader) == keys_of(expected)


@pytest.mark.parametrize(("epoch", "error"), [(1.5, TypeError), ("a", TypeError), (None, TypeError), (-1, ValueError)])
def test_an_epoch_is_an_integer_wherever_it_is_set(packed: Path, epoch: Any, error: type[Exception]) -> None:
    mapped = ShardMapDataset(packed, fields="key")
    other, numpys = DataLoader(range(3), sampler=EpochSampler(range(3))), cast(int, np.int64(3))
    for named in (make_loader(packed), make_sampled(packed), ShardDataset(packed), mapped, EpochSampler(mapped), other):
        with pytest.raises(error, match="epoch must be"):
            named.set_epoch(epoch)
        named.set_epoch(numpys)
    assert json.loads(json.dumps(make_loader(packed).state_dict()))["epoch"] == 0


@pytest.mark.parametrize("make", KINDS)
def test_length_does_not_change_with_a_loaded_state(make: Any, packed: Path) -> None:
    loader = make(packed)
    next(iter(loader))
    resumed = make(packed)
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == len(loader) == 6


def test_a_state_of_another_seed_is_refused(packed: Path) -> None:
    state = make_loader(packed, seed=1).state_dict()
    with pytest.raises(StateError, match=r"order\.seed is 1 in the state and 0 here"):
        make_loader(packed).load_state_dict(state)


def test_the_samplers_own_set_epoch_and_state_count_too(packed: Path) -> None:
    loader = make_sampled(packed)
    sampler = loader.sampler
    assert isinstance(sampler, EpochSampler)
    before = keys_of(islice(loader, 2))
    state = loader.state_dict()
    resumed = make_sampled(packed)
    resumed.load_state_dict(state)
    assert isinstance(resumed.sampler, EpochSampler)
    resumed.sampler.set_epoch(0)  # As frameworks do that do not know the loader's.
    assert sorted(before + keys_of(resumed)) == sorted(keys_of(make_sampled(packed)))


@pytest.mark.parametrize("make", [make_loader, make_sampled])
@pytest.mark.parametrize("is_fast", [False, True])
def test_an_epoch_that_cannot_be_started_is_not_counted(
    make: Any, is_fast: bool, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make(packed) if is_fast else make(packed, worker_init_fn=id)
    loader.load_state_dict({**loader.state_dict(), "epoch": 3, "position": 4})

    def fail(*_: object, **__: object) -> Any:
        raise OSError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr("shardio.loader.executors.fetching.Fetching.start", fail)
        patched.setattr("shardio.loader.executors.pipeline.CallingProcess.start", fail)
        patched.setattr("shardio.loader.executors.pipeline.WorkerProcesses.start", fail)
        with pytest.raises(OSError, match="no memory"):
            iter(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (3, 4)
    whole = make(packed)
    whole.set_epoch(3)
    assert keys_of(loader) == keys_of(whole)[4:]


def test_a_samplers_epoch_that_cannot_be_started_is_not_counted(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = EpochSampler(ShardMapDataset(packed))
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 4})
    with monkeypatch.context() as patched:
        patched.setenv("RANK", "1")  # Of how many?
        with pytest.raises(ValueError, match="WORLD_SIZE"):
            iter(sampler)
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == (3, 4)
