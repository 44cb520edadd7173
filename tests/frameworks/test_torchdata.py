"""torchdata's StatefulDataLoader with shardio's order delivers every sample once, even in resumed runs."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import EpochSampler, SampleError, ShardDataset, ShardMapDataset, StateError
from shardio.check import Coverage, Delivery, ExpectedSamples, make_report
from tests.faults.damage import BATCH_SIZE, Subject, cut_off, key_of, order_of
from tests.faults.worker_processes import CROP
from tests.raising import assert_raises

# torchdata triggers torch's warning.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def make_shards(packed: Path, *, known_batch_size: int | None = None, num_workers: int = 0, **options: Any) -> Any:
    share = {"batch_size": known_batch_size, "rank": 0, "world_size": 1, **options}
    dataset = ShardDataset(packed, fields="key", shuffle=True, **share)
    return StatefulDataLoader(dataset, 4, num_workers=num_workers), dataset


def make_sampled(packed: Path, *, known_batch_size: int | None = None, num_workers: int = 0, **options: Any) -> Any:
    dataset = ShardMapDataset(packed, fields="key")
    sampler = EpochSampler(dataset, batch_size=known_batch_size, **{"rank": 0, "world_size": 1, **options})
    return StatefulDataLoader(dataset, 4, sampler=sampler, num_workers=num_workers), sampler


KINDS = [make_shards, make_sampled]


def run(make: Any, packed: Path, *, epochs: int, stop: Any = None, **options: Any) -> list[list[str]]:
    """Return the keys of each epoch. ``stop`` is the epoch and the batch after which new objects resume the run."""
    loader, order = make(packed, **options)
    found = []
    for epoch in range(epochs):
        order.set_epoch(epoch)
        if stop is None or stop[0] != epoch:
            found.append([key for batch in loader for key in batch])
            continue
        before = list(islice(loader, stop[1]))
        state = json.loads(json.dumps(loader.state_dict()))
        loader, order = make(packed, **options)
        loader.load_state_dict(state)
        order.set_epoch(epoch)
        found.append([key for batch in (*before, *loader) for key in batch])
    return found


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    ("num_workers", "known_batch_size"), [(0, None), (0, 4), (0, 3), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_resumed_equals_uninterrupted(make: Any, packed: Path, num_workers: int, known_batch_size: int | None) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "known_batch_size": known_batch_size}
    expected = run(make, packed, epochs=3, **options)
    assert expected[0] != expected[1] != expected[2]
    assert all(sorted(epoch) == sorted(expected[0]) for epoch in expected)
    for num_batches in (0, 1, 2, 5) if num_workers == 0 else (3,):
        assert run(make, packed, epochs=3, stop=(1, num_batches), **options) == expected


@pytest.mark.parametrize("make", KINDS)
def test_a_resumed_epoch_can_be_stopped_again(make: Any, packed: Path) -> None:
    expected = run(make, packed, epochs=1)[0]
    state: dict[str, Any] = {}
    found = []
    for _ in range(6):
        loader, _ = make(packed)
        loader.load_state_dict(state)
        found += next(iter(loader))
        state = loader.state_dict()
    assert found == expected


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_two_ranks_share_two_resumed_epochs(make: Any, packed: Path, num_workers: int) -> None:
    expected = ExpectedSamples.of_keys(list(ShardDataset(packed, fields="key")), num_repeats=1)
    options: dict[str, Any] = {"num_workers": num_workers, "known_batch_size": 4, "world_size": 2}
    ranks = [run(make, packed, epochs=2, stop=(1, 1), rank=rank, **options) for rank in range(2)]
    for epoch in range(2):
        coverage = Coverage()
        for rank, epochs in enumerate(ranks):
            coverage.add(epochs[epoch], Delivery(rank=rank, worker=None, batch=0))
        assert coverage.num_deliveries == 22
        make_report(coverage, expected).raise_if_wrong()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("is_finished", [False, True])
def test_at_the_end_the_rest_is_empty_and_the_next_epoch_follows(make: Any, packed: Path, is_finished: bool) -> None:
    expected = run(make, packed, epochs=3)
    loader, order = make(packed)
    order.set_epoch(1)
    batches = iter(loader)
    before = [key for batch in islice(batches, 6) for key in batch]
    assert before == expected[1]
    if is_finished:
        assert next(batches, None) is None
    state = loader.state_dict()
    assert state["_iterator_finished"] == is_finished
    resumed, order = make(packed)
    resumed.load_state_dict(state)
    if not is_finished:
        order.set_epoch(1)
        assert list(resumed) == []
    order.set_epoch(2)
    assert [key for batch in resumed for key in batch] == expected[2]


@pytest.mark.parametrize("resumes", [False, True])
def test_after_an_unreadable_sample_the_next_batch_is_whole(tmp_path: Path, resumes: bool) -> None:
    order = order_of("shards")
    subject = Subject(tmp_path, "shards", {order[1][0]: cut_off, order[3][1]: cut_off, order[4][-1]: cut_off})
    options: dict[str, Any] = {"shuffle": True, "transform": CROP, "batch_size": BATCH_SIZE}
    dataset = ShardDataset(subject.tars, fields=("image", "key"), **options)
    loader = StatefulDataLoader(dataset, BATCH_SIZE)
    batches = iter(loader)
    for numbers in order:
        if not set(numbers) & set(subject.bad):
            assert next(batches)[1] == tuple(map(key_of, numbers))
            continue
        with pytest.raises(SampleError):
            next(batches)
        if resumes:
            state, loader = loader.state_dict(), StatefulDataLoader(dataset, BATCH_SIZE)
            loader.load_state_dict(state)
            batches = iter(loader)
    assert list(batches) == []


@pytest.mark.parametrize("make", KINDS)
def test_a_state_of_another_share_is_refused(make: Any, packed: Path) -> None:
    loader, _ = make(packed, rank=1, world_size=2)
    next(iter(loader))
    state = loader.state_dict()
    other, _ = make(packed, rank=0, world_size=3)
    other.load_state_dict(state)
    assert_raises(StateError, r"rank is 1 in the state and 0 here; world_size is 2 .* and 3 here", iter, other)


def test_a_state_of_another_order_is_refused(packed: Path) -> None:
    iterator: Any = iter(ShardDataset(packed, fields="key", shuffle=True, seed=1))
    other: Any = iter(ShardDataset(packed, fields="key", shuffle=True))
    assert_raises(StateError, r"order\.seed is 1 in the state and 0 here", other.load_state_dict, iterator.state_dict())
    for yielded in (-1, None):
        with pytest.raises(StateError, match="'yielded' must be an integer"):
            other.load_state_dict({**other.state_dict(), "yielded": yielded})
