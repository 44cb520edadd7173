"""A resumed loader over any dataset delivers the batches that an uninterrupted one would, and rereads no sample."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import islice
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
    SequentialSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from shardio import DataLoader, DevicePrefetcher, StateError, get_worker_info
from shardio.train import in_groups
from tests.device.late_stream import prefetch_late
from tests.loader.programs import (
    WORKERS,
    Buckets,
    Called,
    Mapped,
    Program,
    Shuffled,
    Stateful,
    describe,
    flatten,
    programs,
    seed_all,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create",
    "ignore:.* has no state_dict",
    "ignore:'pin_memory' argument",
    "ignore:'set_vital' is deprecated",  # torchdata triggers torch's warning.
)


@given(programs(), st.integers(0, 8), st.booleans())
@settings(max_examples=settings().max_examples // 7)  # Most examples start worker processes.
def test_a_resumed_program_sees_the_rest(program: Program, num_before: int, forgets_seed: bool) -> None:
    if program.dataset.kind == "draws":
        return  # The dataset has no state, so its generators start again.
    program.arguments["in_order"] = True  # Without in_order, the remaining batches may arrive in any order.
    seed_all(3)
    loader = program.make(DataLoader)
    iterator = iter(loader)
    num_seen = sum(1 for _ in islice(iterator, num_before))
    state = json.loads(json.dumps(loader.state_dict()))
    rest = [*(iterator if num_seen == num_before else loader), "the next epoch", *loader]
    seed_all(99 if forgets_seed else 3)
    resumed = program.make(DataLoader)
    resumed.load_state_dict(state)
    assert describe([*resumed, "the next epoch", *resumed]) == describe(rest)


def begin(loader: Any, num_batches: int) -> Any:
    iterator = iter(loader)
    assert len(list(islice(iterator, num_batches))) == num_batches
    return iterator


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_no_sample_is_read_again_and_without_states_any_number_of_workers_resumes(num_workers: int) -> None:
    read = list[int]()
    loader, resumed = (DataLoader(Called(get, 1000), 10, True, collate_fn=len) for get in (abs, read.append))
    begin(loader, 70)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [10] * 30
    assert len(read) == 300
    loader = DataLoader(range(40), batch_size=3, shuffle=True, num_workers=2)
    iterator = begin(loader, 5)
    resumed = DataLoader(range(40), batch_size=3, shuffle=True, num_workers=num_workers)
    resumed.load_state_dict(loader.state_dict())
    assert flatten(resumed) == flatten(iterator)


def find_worker_id(_: int) -> Any:
    info = get_worker_info()
    assert info is not None
    return info.id


def test_a_resumed_epoch_begins_with_the_worker_that_would_make_its_next_batch() -> None:
    loader, resumed = (DataLoader(Called(find_worker_id), 2, num_workers=number) for number in (2, 3))
    begin(loader, 4)
    resumed.load_state_dict(loader.state_dict())
    assert flatten(resumed) == [1, 1, 2, 2]  # Without resuming, the six batches come from workers 0, 1, 2, 0, 1 and 2.


class Numbers(IterableDataset[int]):
    size = 30

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(0 if info is None else info.id, self.size, 1 if info is None else info.num_workers)


class Noisy(Numbers):
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


def test_another_number_of_workers_and_torchdatas_samplers_are_refused_where_it_matters() -> None:
    loader, other, third = (DataLoader(Numbers(), 5, num_workers=number) for number in (2, 1, 0))
    iterator = begin(loader, 1)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="use num_workers=2"):
        iter(other)
    other.num_workers = 2
    assert describe(list(other)) == describe(list(iterator))
    third.load_state_dict(loader.state_dict())  # This is the state at the end of an epoch.
    assert sorted(flatten(third)) == list(range(30))

    loader = StatefulDataLoader(range(20), batch_size=2, shuffle=True)
    begin(loader, 1)
    resumed = DataLoader(range(20), batch_size=2, shuffle=True)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=r"StatefulDataLoader adds the methods to torch's RandomSampler"):
        iter(resumed)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_reading_again_is_warned_of(num_workers: int) -> None:
    for dataset, warns in ((Numbers(), True), (Noisy(), False), (range(30), False)):
        loader, resumed = (DataLoader(dataset, batch_size=4, num_workers=num_workers) for _ in range(2))
        begin(loader, 3)
        resumed.load_state_dict(loader.state_dict())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                list(resumed)
        said = [str(each.message) for each in caught if each.category is RuntimeWarning]
        expected = (
            "Numbers has no state_dict, so resuming reads its first 3 batches again, without delivering the samples: "
        )
        assert [text[: len(expected)] for text in said] == [expected] * warns


@pytest.mark.parametrize(
    ("dataset", "num_workers", "every"),
    [
        (Numbers, 0, 0),
        (Noisy, 0, 5),
        (Noisy, 2, 5),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((Numbers, 2, 5), (Noisy, 2, 0))),
    ],
)
def test_states_are_exact_however_rarely_workers_report_them(dataset: Any, num_workers: int, every: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "batch_size": 4, "snapshot_every_n_steps": every}
    whole = describe(list(DataLoader(dataset(), **options)))[1]
    for stop in (0, len(whole) // 2, len(whole) - 1):
        loader, resumed = (DataLoader(dataset(), **options) for _ in range(2))
        iterator = begin(loader, stop)
        resumed.load_state_dict(loader.state_dict())
        del iterator
        assert describe(list(resumed))[1] == whole[stop:]
        assert describe(list(resumed))[1] == whole, "the next epoch is whole"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_after_the_last_batch_the_rest_is_empty_and_after_the_end_the_next_epoch_begins(num_workers: int) -> None:
    loader = DataLoader(range(6), batch_size=2, num_workers=num_workers, persistent_workers=num_workers > 0)
    iterator = begin(loader, 3)
    before = loader.state_dict()
    assert next(iterator, None) is None
    for state, num_batches in ((before, 0), (loader.state_dict(), 3)):
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        assert len(list(loader)) == num_batches


@pytest.mark.parametrize("size", [12, 11])
@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sampler_with_a_state_is_asked(num_workers: int, size: int) -> None:
    whole = list(range(size))[::-1]
    for stop in range(6):
        loader, resumed = (
            DataLoader(range(size), 3, sampler=Stateful(size), num_workers=num_workers) for _ in range(2)
        )
        iterator = begin(loader, min(stop, 4))
        assert stop < 5 or next(iterator, None) is None
        resumed.load_state_dict(loader.state_dict())
        assert flatten(resumed) == whole[3 * (stop % 5) :]
        assert flatten(resumed) == whole


class Paired(BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::-1])


@pytest.mark.parametrize("is_paired", [False, True])
def test_generators_and_epochs_of_samplers_continue(is_paired: bool) -> None:
    def make(sampler: Any) -> Any:
        batches = Paired if is_paired else BatchSampler
        return DataLoader(range(20), batch_sampler=batches(sampler, 5, False))

    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    drawn: list[Any] = [RandomSampler(range(20), generator=generator) for generator in generators]
    distributed: list[Any] = [DistributedSampler(Mapped(20, "int"), num_replicas=2, rank=1) for _ in range(2)]
    distributed[0].set_epoch(5)
    for samplers in (drawn, distributed):
        loader, other = map(make, samplers)
        list(loader)
        iterator = begin(loader, 1)
        other.load_state_dict(loader.state_dict())
        assert describe([*other, *other]) == describe([*iterator, *loader])
    assert distributed[1].epoch == 5


HABITS: dict[str, tuple[Any, bool, bool]] = {
    "none": (None, False, False),
    "seeds each epoch": (lambda epoch: 10 + epoch, False, False),
    "seeds each epoch, and draws": (lambda epoch: 10 + epoch, True, False),
    "seeds each epoch the same": (lambda epoch: 10, True, False),
    "restores": (None, False, True),
    "restores, and draws": (None, True, True),
}
"""A program's use of the generators: its seed in each epoch, whether it draws numbers, and whether it restores them."""

DRAWING: dict[str, Any] = {
    "torch": lambda: {"batch_size": 3, "shuffle": True},
    "torch, own": lambda: {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(8)},
    "python": lambda: {"batch_size": 3, "sampler": Shuffled(12)},
    "numpy": lambda: {"batch_sampler": Buckets(12)},
}


@pytest.mark.parametrize("stop", [1, 4, 5])
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("kind", DRAWING)
def test_later_epochs_have_the_order_of_torchs_loader(kind: str, habit: str, stop: int) -> None:
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
                if draws:  # Dropout and random augmentation also draw random numbers.
                    random.random(), np.random.rand(), torch.rand(())
                if epoch == 1 and stop is not None and (stop := stop - 1) == 0:
                    break
            if epoch == 1 and stop is not None:
                return

    seed_all(3)
    whole = list(run(torch.utils.data.DataLoader(Mapped(12, "int"), **DRAWING[kind]())))
    seed_all(3)
    loader = DataLoader(range(12), **DRAWING[kind]())
    received = list(run(loader, stop=stop))
    state, states = loader.state_dict(), (random.getstate(), np.random.get_state(), torch.get_rng_state())
    seed_all(99)
    resumed = DataLoader(range(12), **DRAWING[kind]())
    resumed.load_state_dict(state)
    if restores:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
    assert received + list(run(resumed, first_epoch=2 if stop == 5 else 1)) == whole


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


class Weights(torch.nn.Module):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def _save_to_state_dict(self, *arguments: Any, **options: Any) -> None:
        raise AssertionError("the weights were requested")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_weights_of_a_dataset_are_not_its_state(num_workers: int) -> None:
    loader = DataLoader(Weights(), num_workers=num_workers)
    next(iter(loader))
    assert loader.state_dict()


@pytest.mark.parametrize(
    ("dataset", "num_workers", "stop"),
    [(Noisy, 0, 1), (Noisy, 2, 4), (Numbers, 0, 4), (Numbers, 2, 1), (partial(Called, abs, 30), 0, 4)],
)
def test_states_of_torchdatas_loader_can_be_loaded(dataset: Any, num_workers: int, stop: int) -> None:
    options: dict[str, Any] = {"num_workers": num_workers, "batch_size": 4}
    loader = StatefulDataLoader(dataset(), **options, snapshot_every_n_steps=3)
    iterator = begin(loader, stop)
    resumed = DataLoader(dataset(), **options)
    resumed.load_state_dict(loader.state_dict())
    assert describe(list(resumed)) == describe(list(iterator))


class Asking:
    """An object whose ``state_dict`` needs arguments, as in MosaicML's Streaming library."""

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        raise AssertionError("these arguments are unknown")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("there is no state")


class Failing(Asking):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        raise LookupError("no state yet")


class Unsent(Asking):
    """An object whose state can be copied, but not pickled."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"function": lambda: None}


class Streamed(Numbers):
    size = 12


class Iterated(Streamed):
    def __init__(self, kind: type) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[int]:
        numbers = super().__iter__()
        methods = {"__iter__": lambda it: it, "__next__": lambda _: next(numbers)}
        iterator: Iterator[int] = type("Numbers", (self.kind,), methods)()
        return iterator


PLACES: dict[str, Any] = {
    "dataset": lambda kind: (type("MyDataset", (kind, Called), {})(abs), {}),
    "iterable dataset": lambda kind: (type("MyDataset", (kind, Streamed), {})(), {}),
    "iterator": lambda kind: (Iterated(kind), {}),
    "sampler": lambda kind: (range(12), {"sampler": type("MySampler", (kind, SequentialSampler), {})(range(12))}),
    "batch sampler": lambda kind: (range(12), {"batch_sampler": type("MySampler", (kind, list), {})([[3, 4], [7]])}),
}


@pytest.mark.parametrize(
    ("place", "kind", "way"),
    [
        *((place, Asking, "caller") for place in PLACES),
        *(("dataset", Failing, way) for way in WORKERS),
        *(("iterator", kind, way) for kind, way in ((Failing, "caller"), (Asking, "processes"), (Failing, "threads"))),
    ],
)
def test_a_state_that_cannot_be_asked_for_is_an_error_only_if_it_is_wanted(place: str, kind: type, way: str) -> None:
    dataset, options = PLACES[place](kind)
    expected = [batch.tolist() for batch in torch.utils.data.DataLoader(dataset, **options)]
    loader = DataLoader(dataset, **options, **WORKERS[way])
    error = "missing 2 required positional arguments" if kind is Asking else "LookupError: no state yet"
    received = list[list[int]]()
    for batch in loader:
        received.append(batch.tolist())
        with pytest.raises(StateError, match=rf"(My\w+|Numbers)\.state_dict\(\) raised .*{error}.*takes no arguments"):
            loader.state_dict()
    assert sorted(received) == sorted(expected)
    with pytest.raises(StateError, match=error):
        loader.state_dict()
    prefetched = [batch.tolist() for batch, _ in in_groups(DevicePrefetcher(loader, "cpu"), 2)]
    assert sorted(prefetched) == sorted(expected)


@pytest.mark.parametrize("place", ["dataset", "iterator"])
def test_a_state_that_cannot_be_sent_is_an_error_only_if_it_is_wanted(place: str) -> None:
    dataset, options = PLACES[place](Unsent)
    loader = DataLoader(dataset, **options, num_workers=1)
    for number, batch in enumerate(loader):
        assert batch.tolist() == [number]
        with pytest.raises(StateError, match=r"cannot be pickled \(.*lambda.*"):
            loader.state_dict()
    assert number == 11


@pytest.mark.parametrize("is_late", [False, True])
def test_a_prefetcher_of_a_loader_whose_state_cannot_be_asked_for(is_late: bool) -> None:
    class Loader(Asking):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(5))

    prefetcher = prefetch_late(Loader(), depth=2)[0] if is_late else DevicePrefetcher(Loader(), "cpu")
    assert [int(batch) for batch in prefetcher] == list(range(5))
    iterator = iter(prefetcher)
    next(iterator)
    with pytest.raises(StateError if is_late else TypeError, match="missing 2 required positional arguments"):
        prefetcher.state_dict()
