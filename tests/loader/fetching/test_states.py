"""A loader over any dataset that resumes delivers the rest of an uninterrupted epoch, without reading samples again."""

from __future__ import annotations

import copy
import itertools
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings, strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from shardio import DataLoader, ShardDataset, StateError
from tests.loader.fetching.programs import Buckets, Mapped, Program, Shuffled, describe, programs, seed_all

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create", "ignore:.* has no state_dict", "ignore:'pin_memory' argument"
)


@given(programs(), st.integers(0, 8), st.booleans())
@settings(max_examples=7, deadline=None)
def test_a_resumed_program_sees_the_rest(program: Program, num_before: int, forgets_seed: bool) -> None:
    if program.dataset.kind == "draws":
        return  # Only a dataset with a state can continue its generators.
    program.arguments["in_order"] = True  # Otherwise, the rest may come in any order.
    seed_all(3)
    loader = program.make(DataLoader)
    iterator = iter(loader)
    num_seen = sum(1 for _ in itertools.islice(iterator, num_before))
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [*(iterator if num_seen == num_before else loader), "the next epoch", *loader]
    seed_all(99 if forgets_seed else 3)
    resumed = program.make(DataLoader)
    resumed.load_state_dict(state)
    assert describe([*resumed, "the next epoch", *resumed]) == describe(rest)


class Counting:
    """A map-style dataset that counts what is read of it."""

    def __init__(self) -> None:
        self.num_read = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        self.num_read += 1
        return index


def test_no_sample_is_read_again() -> None:
    loader = DataLoader(Counting(), batch_size=10, shuffle=True)
    iterator = iter(loader)
    for _ in range(70):
        next(iterator)
    resumed = DataLoader(dataset := Counting(), batch_size=10, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    assert len(list(resumed)) == 30
    assert dataset.num_read == 300


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_without_states_any_number_of_workers_resumes(num_workers: int) -> None:
    loader = DataLoader(range(40), batch_size=3, shuffle=True, num_workers=2)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    resumed = DataLoader(range(40), batch_size=3, shuffle=True, num_workers=num_workers)
    resumed.load_state_dict(loader.state_dict())
    assert describe(list(resumed)) == describe(list(iterator))


class Numbers(IterableDataset[int]):
    """An iterable dataset; each worker yields its part."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0 if info is None else info.id, 30, 1 if info is None else info.num_workers)


class Noisy(Numbers):
    """An iterable dataset with random numbers and a state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        first, self.position = self.position, 0
        for self.position, number in enumerate(list(super().__iter__())[first:], first + 1):
            yield number, random.Random(number).random()
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_another_number_of_workers_is_refused_where_it_matters() -> None:
    loader = DataLoader(Numbers(), num_workers=2)
    iterator = iter(loader)
    next(iterator)
    other = DataLoader(Numbers(), num_workers=3)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="use num_workers=2"):
        iter(other)
    other.num_workers = 2
    assert describe(list(other)) == describe(list(iterator))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_again_is_warned_of(num_workers: int) -> None:
    for dataset, warns in ((Numbers(), True), (Noisy(), False), (range(30), False)):
        loader, resumed = (DataLoader(dataset, batch_size=4, num_workers=num_workers) for _ in range(2))
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        resumed.load_state_dict(loader.state_dict())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                list(resumed)
        said = [str(each.message) for each in caught if each.category is RuntimeWarning]
        expected = "Numbers has no state_dict, so resuming reads its first 3 batches again and drops them: give Numbers"
        assert [text[: len(expected)] for text in said] == [expected] * warns


@pytest.mark.parametrize("dataset", [Numbers, Noisy])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("every", [0, 5])
def test_states_are_exact_however_rarely_workers_report_them(dataset: Any, num_workers: int, every: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "batch_size": 4, "snapshot_every_n_steps": every}
    whole = describe(list(DataLoader(dataset(), **options)))[1]
    for stop in (0, len(whole) // 2, len(whole) - 1):
        loader = DataLoader(dataset(), **options)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        state = loader.state_dict()
        resumed = DataLoader(dataset(), **options)
        resumed.load_state_dict(state)
        assert describe(list(resumed))[1] == whole[stop:]
        assert describe(list(resumed))[1] == whole, "the next epoch is whole"


def test_the_state_after_an_early_break_and_the_state_just_loaded_are_the_same() -> None:
    loader = DataLoader(range(20), batch_size=2, num_workers=1, shuffle=True)
    for _ in loader:
        break
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert len(list(loader)) == 9
    assert len(list(loader)) == 10


def test_after_the_last_batch_the_rest_is_empty_and_after_the_end_the_next_epoch_begins() -> None:
    for num_workers in (0, 2):
        loader = DataLoader(range(6), batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        before = loader.state_dict()
        assert next(iterator, None) is None
        for state, num_batches in ((before, 0), (loader.state_dict(), 3)):
            loader.load_state_dict(state)
            assert len(list(loader)) == num_batches


class Shuffling(Sampler[int]):
    """A user's sampler with a state whose end is the end of the epoch, not the beginning of the next one."""

    def __init__(self) -> None:
        self.num_yielded = 0
        self.first = 0

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, 0
        for self.num_yielded, index in enumerate(range(first, 12), first + 1):
            yield 11 - index

    def state_dict(self) -> dict[str, int]:
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["num_yielded"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_with_a_state_is_asked(num_workers: int) -> None:
    whole = list(range(11, -1, -1))
    for stop in range(5):
        loader = DataLoader(range(12), batch_size=3, sampler=Shuffling(), num_workers=num_workers)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator, None)
        if stop == 4:
            assert next(iterator, None) is None
        resumed = DataLoader(range(12), batch_size=3, sampler=Shuffling(), num_workers=num_workers)
        resumed.load_state_dict(loader.state_dict())
        assert torch.cat(list(resumed) or [torch.empty(0)]).tolist() == whole[3 * (stop % 4) :]
        assert torch.cat(list(resumed)).tolist() == whole


def test_a_generator_of_the_users_continues() -> None:
    def make(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(range(20), sampler=RandomSampler(range(20), generator=generator), batch_size=5)

    loader, other = make(1), make(2)
    list(loader)
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    assert describe([*other, *other]) == describe([*iterator, *loader])


def draw_all() -> None:
    """Draw from the generators of Python, numpy and torch, as Dropout and random augmentation do."""
    random.random(), np.random.rand(), torch.rand(())


def find_states() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore(states: Any) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


HABITS: dict[str, tuple[Any, bool, bool]] = {
    "none": (None, False, False),
    "seeds each epoch": (lambda epoch: 10 + epoch, False, False),
    "seeds each epoch, and draws": (lambda epoch: 10 + epoch, True, False),
    "seeds each epoch alike": (lambda epoch: 10, True, False),
    "restores": (None, False, True),
    "restores, and draws": (None, True, True),
}
"""What a program does with the generators: its seed of each epoch, whether it draws, and whether it restores them."""

DRAWING: dict[str, Any] = {
    "torch": lambda: {"batch_size": 3, "shuffle": True},
    "torch, own": lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(8)},
    "python": lambda: {"batch_size": 3, "sampler": Shuffled(12)},
    "numpy": lambda: {"batch_sampler": Buckets(12)},
}
"""The generator that a sampler draws from, and the arguments of the loader."""


@pytest.mark.parametrize("stop", [1, 4, 5])
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("kind", DRAWING)
def test_later_epochs_have_the_order_of_torchs_loader(kind: str, habit: str, stop: int) -> None:
    """The run is stopped in its second epoch: after some batches, or after the end (5). It goes on in a new process."""
    find_seed, draws, restores = HABITS[habit]

    def run(loader: Any, first_epoch: int = 0, stop: int | None = None) -> Iterator[Any]:
        for epoch in range(first_epoch, 4):
            if find_seed is not None:
                seed_all(find_seed(epoch))
                if isinstance(loader.generator, torch.Generator):
                    loader.generator.manual_seed(find_seed(epoch))
            iterator = iter(loader)
            while (batch := next(iterator, None)) is not None:
                yield batch.tolist()
                if draws:
                    draw_all()
                if epoch == 1 and stop is not None and (stop := stop - 1) == 0:
                    break
            if epoch == 1 and stop is not None:
                return

    seed_all(3)
    whole = list(run(torch.utils.data.DataLoader(Mapped(12, "int"), **DRAWING[kind]())))
    seed_all(3)
    loader = DataLoader(range(12), **DRAWING[kind]())
    received = list(run(loader, stop=stop))
    state, states = loader.state_dict(), find_states()
    seed_all(99)
    resumed = DataLoader(range(12), **DRAWING[kind]())
    resumed.load_state_dict(state)
    if restores:
        restore(states)
    assert received + list(run(resumed, first_epoch=2 if stop == 5 else 1)) == whole


class Paired(BatchSampler):
    """A user's batch sampler, around torch's samplers."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::-1])


def test_generators_and_epochs_of_samplers_inside_a_users_batch_sampler_continue() -> None:
    def make(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(range(20), batch_sampler=Paired(RandomSampler(range(20), generator=generator), 4, False))

    loader, other = make(1), make(2)
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    assert describe(list(other)) == describe(list(iterator))
    samplers: list[Any] = [DistributedSampler(Mapped(20, "int"), num_replicas=2, rank=1) for _ in range(2)]
    loader, other = (DataLoader(range(20), batch_sampler=Paired(sampler, 4, False)) for sampler in samplers)
    samplers[0].set_epoch(5)
    iterator = iter(loader)
    next(iterator)
    other.load_state_dict(loader.state_dict())
    assert samplers[1].epoch == 5
    assert describe(list(other)) == describe(list(iterator))


def test_another_epoch_drops_the_position_in_the_loaded_one() -> None:
    sampler: Any = DistributedSampler(Mapped(20, "int"), num_replicas=1, rank=0)
    loader = DataLoader(range(20), 4, sampler=sampler)
    sampler.set_epoch(2)
    next(iter(loader))
    for epoch, num_batches in ((2, 4), (3, 5)):
        loader.load_state_dict(state := loader.state_dict())
        loader.set_epoch(epoch)
        assert len(list(loader)) == num_batches
        loader.load_state_dict(state)


def test_copies_of_a_loader_have_positions_of_their_own(packed: Path) -> None:
    loaders = DataLoader(range(20), 4), DataLoader(ShardDataset(packed, fields="key"), 4)
    for loader, num_batches in zip(loaders, (5, 6), strict=True):
        iterator = iter(loader)
        next(iterator)
        copied, state = copy.copy(loader), loader.state_dict()
        assert copied.state_dict() == state
        assert len(list(copied)) == num_batches
        copied.set_epoch(7)
        assert loader.state_dict() == state
        next(iterator)
        loader.load_state_dict(loader.state_dict())
        assert len(list(loader)) == num_batches - 2


@pytest.mark.parametrize("num_workers", [0, 3])
def test_after_an_epoch_any_number_of_workers_may_follow(num_workers: int) -> None:
    loader, other = DataLoader(Numbers(), 5, num_workers=2), DataLoader(Numbers(), 5, num_workers=num_workers)
    list(loader)
    other.load_state_dict(loader.state_dict())
    assert sorted(torch.cat(list(other)).tolist()) == list(range(30))


class Weights(torch.nn.Module):
    """A map-style dataset that is a module. Its state is not a position."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def _save_to_state_dict(self, *arguments: Any, **options: Any) -> None:
        raise AssertionError("the weights were asked for")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_weights_of_a_dataset_are_not_its_state(num_workers: int) -> None:
    loader = DataLoader(Weights(), num_workers=num_workers)
    next(iter(loader))
    assert loader.state_dict()
