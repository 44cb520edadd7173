"""Programs that use torch's DataLoader see the same batches, of the same types, and may use what shardio's adds."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import time
import warnings
import weakref
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import given, settings, strategies as st
from torch.utils.data import IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import shardio
from shardio import CoverageError, DataLoader, DevicePrefetcher, IdentityError, ShardMapDataset, StateError
from tests.loader.programs import WORKERS, Program, describe, programs, run, seed_all

_MAX_EXAMPLES = settings().max_examples // 6  # Most start worker processes.


@given(programs(), st.integers(0, 6) | st.none())
@settings(max_examples=_MAX_EXAMPLES)
def test_random_programs_see_torchs_batches(program: Program, num_taken: int | None) -> None:
    if not program.arguments.get("in_order", True):
        num_taken = None  # The first batches may be any.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of more workers than processors.
        seed_all(3)
        expected = run(program.make(torch.utils.data.DataLoader), num_taken)
        seed_all(3)
        assert describe(run(program.make(DataLoader), num_taken)) == describe(expected)


@given(programs())
@settings(max_examples=_MAX_EXAMPLES // 2)
def test_threads_deliver_the_same_samples(program: Program) -> None:
    if program.dataset.kind in ("draws", "sliced array") or isinstance(
        program.dataset, torch.utils.data.IterableDataset
    ):
        return  # Threads share the global generators, torch's get_worker_info, and the memory of arrays.
    program.arguments.pop("worker_init_fn", None)  # It seeds the generators of the samplers, too.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_all(3)
        expected = run(program.make(torch.utils.data.DataLoader))
        seed_all(3)
        assert describe(run(program.make(DataLoader, worker_method="thread"))) == describe(expected)


@pytest.mark.parametrize(
    ("is_mapped", "options"),
    [
        *((is_mapped, {}) for is_mapped in (False, True)),
        (False, {"num_workers": 2}),
        (True, {"num_workers": 1, "persistent_workers": True}),
    ],
)
def test_iterators_of_one_loader_are_torchs(packed: Path, is_mapped: bool, options: dict[str, Any]) -> None:
    dataset: Any = ShardMapDataset(packed, fields="key") if is_mapped else range(24)

    def zipped(loader_class: Any) -> Any:
        loader = loader_class(dataset, batch_size=4, **options)
        return [describe(list(zip(loader, loader, strict=True))) for _ in range(2)]

    assert zipped(DataLoader) == zipped(torch.utils.data.DataLoader)


def test_the_class_can_be_subscripted() -> None:
    loader: DataLoader[int] = DataLoader[int](range(3))
    assert isinstance(loader, torch.utils.data.DataLoader)


NUMBERS = list(range(41))


class Counting(IterableDataset[int]):
    """An iterable dataset without a state."""

    def __iter__(self) -> Any:
        worker = torch.utils.data.get_worker_info()
        return iter(NUMBERS if worker is None else NUMBERS[worker.id :: worker.num_workers])


def make(batch_size: int | None, num_workers: int, dataset: Any = NUMBERS, **options: Any) -> Any:
    return DataLoader(dataset, batch_size=batch_size, num_workers=num_workers, **options)


def save_after(loader: Any, num_batches: int) -> tuple[dict[str, Any], list[int]]:
    """Return the state after some batches, and the samples that are left."""
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    return loader.state_dict(), [number for batch in batches for number in batch.tolist()]


@pytest.mark.parametrize(("num_workers", "drop_last"), [(0, False), (0, True), (2, False)])
def test_a_size_that_is_set_applies_when_it_does_in_torch(num_workers: int, drop_last: bool) -> None:
    def run(base: Any) -> list[list[int]]:
        loader = base(NUMBERS, batch_size=4, num_workers=num_workers, drop_last=drop_last)
        found = []
        for _ in range(2):
            for step, batch in enumerate(loader):
                found.append(batch.tolist())
                if step == 1:
                    loader.batch_sampler.batch_size = 3
        return found

    assert run(DataLoader) == run(torch.utils.data.DataLoader)


@pytest.mark.parametrize(
    ("num_workers", "batch_size", "shuffle"), [(0, 1, True), (0, 5, False), (0, 16, True), (2, 5, True)]
)
def test_a_resumed_run_may_have_batches_of_another_size(num_workers: int, batch_size: int, shuffle: bool) -> None:
    state, left = save_after(make(4, num_workers, shuffle=shuffle), 3)
    resumed = make(batch_size, num_workers, shuffle=shuffle)
    resumed.load_state_dict(state)
    batches = [batch.tolist() for batch in resumed]
    assert [number for batch in batches for number in batch] == left
    assert {len(batch) for batch in batches[:-1]} == {batch_size}
    resumed.load_state_dict(state)
    state, left = save_after(resumed, 1)
    again = make(4, num_workers, shuffle=shuffle)
    again.load_state_dict(state)
    assert [number for batch in again for number in batch.tolist()] == left, "its state counts all samples, too"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it in torch.
@pytest.mark.parametrize(("num_workers", "batch_size"), [(0, 3), (0, 8), (2, 3)])
def test_a_state_of_torchdatas_loader_counts_samples_too(num_workers: int, batch_size: int) -> None:
    state, _ = save_after(StatefulDataLoader(NUMBERS, batch_size=4, num_workers=num_workers), 3)
    resumed = [make(batch_size, num_workers), StatefulDataLoader(NUMBERS, batch_size, num_workers=num_workers)]
    for loader in resumed:
        loader.load_state_dict(state)
    found, expected = ([batch.tolist() for batch in loader] for loader in resumed)
    assert found == expected


def test_a_size_that_changed_in_the_epoch_is_resumed() -> None:
    loader = make(4, 0)
    batches, num_samples = iter(loader), 0
    for step in range(12):
        num_samples += len(next(batches))
        if step == 1:
            loader.batch_sampler.batch_size = 2
    resumed = make(2, 0)
    resumed.load_state_dict(loader.state_dict())
    assert [number for batch in resumed for number in batch.tolist()] == NUMBERS[num_samples:]


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"), [(Counting, 4, 8), (Counting, 4, None), (list, 4, None), (list, None, 4)]
)
def test_another_size_is_refused_where_it_matters(kind: Any, saved: int | None, loaded: int | None) -> None:
    loader = make(saved, 0, kind() or NUMBERS, collate_fn=torch.tensor)
    next(iter(loader))
    resumed = make(loaded, 0, kind() or NUMBERS)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=f"batch_size={loaded}: use batch_size={saved}"):
        iter(resumed)


def test_after_an_epoch_the_size_may_change() -> None:
    loader = make(4, 0, Counting())
    list(loader)
    resumed = make(6, 0, Counting())
    resumed.load_state_dict(loader.state_dict())
    assert sorted(number for batch in resumed for number in batch.tolist()) == NUMBERS


class Twice(torch.utils.data.Sampler[int]):
    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Any:
        return iter([*range(11), 4])


@pytest.mark.parametrize("way", WORKERS)
def test_a_device_is_that_of_a_prefetcher(way: str) -> None:
    workers = WORKERS[way]
    loader = DataLoader(range(10), 4, device="cpu", **workers)
    assert len(loader) == len(iter(loader)) == 3
    expected = DevicePrefetcher(DataLoader(range(10), 4, **workers), "cpu")
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in expected]
    iterator = iter(loader)
    begun = next(iterator).tolist()
    for other in (DataLoader(range(10), 4, device="cpu"), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        other.load_state_dict(loader.state_dict())
        assert begun + [number for batch in other for number in batch.tolist()] == list(range(10))


def test_an_epoch_outlives_its_loader_and_ends_its_workers() -> None:
    others = set(multiprocessing.active_children())
    iterator = iter(DataLoader(range(10), 4, num_workers=1, device="cpu", check_duplicates=True))
    assert len(list(iterator)) == 3
    loader = DataLoader(range(10), 4, num_workers=1, device="cpu", check_duplicates=True)
    watched, iterator = weakref.ref(loader), iter(loader)
    next(iterator)
    gc.disable()
    try:
        del loader
        assert watched() is None
        assert [next(iterator).tolist()] == [[4, 5, 6, 7]]
        del iterator
        assert set(multiprocessing.active_children()) <= others
    finally:
        gc.enable()


@pytest.mark.parametrize("way", WORKERS)
def test_a_repeated_sample_is_an_error(way: str) -> None:
    workers = WORKERS[way]
    loader = DataLoader(range(12), 4, check_duplicates=True, **workers)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in loader]
    repeats = iter(DataLoader(range(12), 4, sampler=Twice(), check_duplicates=True, **workers))
    assert [batch.tolist() for batch in islice(repeats, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(CoverageError, match="batch 2 repeats 4, which batch 1 of this epoch delivered"):
        next(repeats)
    with pytest.raises(TypeError, match="check_duplicates must be True or False"):
        DataLoader(range(3), check_duplicates="yes")  # type: ignore[arg-type]  # the test


def test_without_keys_contents_identify_samples() -> None:
    images = torch.arange(48.0).reshape(12, 4)
    data = torch.utils.data.TensorDataset(images, torch.arange(12))
    assert len(list(DataLoader(data, 4, shuffle=True, check_duplicates=True))) == 3
    assert len(list(iter(DataLoader(data, 4, check_duplicates=True)))) == 3
    with pytest.raises(IdentityError, match="holds a sample with the same content"):
        list(DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=40), check_duplicates=True))


class Slow(torch.utils.data.Dataset[int]):
    """A dataset whose sample 0 takes longer than all others."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        time.sleep(0.2 if index == 0 else 0)
        return index


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_state_knows_what_was_delivered_out_of_order(method: Any) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Slow(), 2, num_workers=2, worker_method=method, in_order=False)

    for num_received in (1, 7):
        loader = make()
        received = [number for batch in islice(loader, num_received) for number in batch.tolist()]
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        rest = [number for batch in resumed for number in batch.tolist()]
        assert 0 not in received or num_received > 1
        assert sorted(received + rest) == list(range(24))


class Workers(torch.utils.data.Dataset[Any]):
    """Tells who reads it."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        ours, torchs = shardio.get_worker_info(), torch.utils.data.get_worker_info()
        return ours is torchs, None if ours is None else ours.id


def test_in_processes_the_worker_is_torchs() -> None:
    for num_workers in (0, 2):
        seen = list(DataLoader(Workers(), None, num_workers=num_workers))
        assert seen == [[True, index % 2 if num_workers else None] for index in range(8)]
