"""Loaders over any dataset: torch's batches, shardio's extensions, and values that workers receive and return."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, settings, strategies as st
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import shardio
from shardio import CoverageError, DataLoader, DevicePrefetcher, IdentityError, SharedList, StateError
from shardio.loader.buffers import MIN_BYTES
from shardio.loader.pickles import Arena, Memory, pack, unpack
from tests.buffers import without_collector
from tests.loader.programs import (
    VALUES,
    WORKERS,
    Called,
    Program,
    Shares,
    as_list,
    describe,
    flatten,
    programs,
    run,
    seed_all,
)
from tests.processes import forkserver_context

_MAX_EXAMPLES = settings().max_examples // 6  # Most examples start worker processes.


@given(programs(), st.integers(0, 6) | st.none())
@settings(max_examples=_MAX_EXAMPLES)
def test_random_programs_see_torchs_batches(program: Program, num_taken: int | None) -> None:
    if not program.arguments.get("in_order", True):
        num_taken = None  # If batches may arrive in any order, the first batches may differ.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Torch warns if there are more workers than processors.
        seed_all(3)
        expected = run(program.make(torch.utils.data.DataLoader), num_taken)
        seed_all(3)
        assert describe(run(program.make(DataLoader), num_taken)) == describe(expected)


@given(programs())
@settings(max_examples=_MAX_EXAMPLES // 2)
def test_threads_deliver_the_same_samples(program: Program) -> None:
    is_stream = isinstance(program.dataset, torch.utils.data.IterableDataset)
    if is_stream or program.dataset.kind in ("draws", "sliced array"):
        return  # Unlike processes, threads share the global generators, torch's get_worker_info, and arrays.
    program.arguments.pop("worker_init_fn", None)  # In threads, this function would also seed samplers' generators.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_all(3)
        expected = run(program.make(torch.utils.data.DataLoader))
        seed_all(3)
        assert describe(run(program.make(DataLoader, worker_method="thread"))) == describe(expected)


NUMBERS = list(range(41))


STREAM = Shares(lambda worker, of: NUMBERS[worker::of])


def make(batch_size: int | None, num_workers: int, dataset: Any = NUMBERS, **options: Any) -> Any:
    return DataLoader[Any](dataset, batch_size=batch_size, num_workers=num_workers, **options)


def save_after(loader: Any, num_batches: int) -> tuple[dict[str, Any], list[int]]:
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    return loader.state_dict(), flatten(batches)


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
    assert flatten(again) == left, "the state counts all samples"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata triggers a warning from torch.
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
    assert flatten(resumed) == NUMBERS[num_samples:]


@pytest.mark.parametrize(
    ("dataset", "saved", "loaded"), [(STREAM, 4, 8), (STREAM, 4, None), (NUMBERS, 4, None), (NUMBERS, None, 4)]
)
def test_another_size_is_refused_within_an_epoch(dataset: Any, saved: int | None, loaded: int | None) -> None:
    loader, resumed = make(saved, 0, dataset, collate_fn=torch.tensor), make(loaded, 0, dataset)
    next(batches := iter(loader))
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=f"batch_size={loaded}: use batch_size={saved}"):
        iter(resumed)
    list(batches)
    resumed.load_state_dict(loader.state_dict())
    assert [number for batch in resumed for number in np.ravel(batch).tolist()] == NUMBERS


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
        assert begun + flatten(other) == list(range(10))


def test_an_epoch_outlives_its_loader_and_ends_its_workers() -> None:
    others = set(multiprocessing.active_children())
    loader = DataLoader(range(10), 4, num_workers=1, device="cpu", check_duplicates=True)
    watched, iterator = weakref.ref(loader), iter(loader)
    next(iterator)
    with without_collector():
        del loader
        assert watched() is None
        assert flatten(iterator) == [4, 5, 6, 7, 8, 9]
        del iterator
        assert set(multiprocessing.active_children()) <= others


@pytest.mark.parametrize("way", WORKERS)
def test_a_repeated_sample_is_an_error(way: str) -> None:
    workers = WORKERS[way]
    loader = DataLoader(range(12), 4, check_duplicates=True, **workers)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in loader]
    repeats = iter(DataLoader(range(12), 4, sampler=[*range(11), 4], check_duplicates=True, **workers))
    assert [batch.tolist() for batch in islice(repeats, 2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(CoverageError, match="batch 2 repeats 4, which batch 1 of this epoch delivered"):
        next(repeats)
    with pytest.raises(TypeError, match="check_duplicates must be True or False"):
        DataLoader(range(3), check_duplicates="yes")  # type: ignore[arg-type]  # a wrong type


def test_without_keys_contents_identify_samples() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(48.0).reshape(12, 4), torch.arange(12))
    assert len(list(DataLoader(data, 4, shuffle=True, check_duplicates=True))) == 3
    with pytest.raises(IdentityError, match="holds a sample with the same content"):
        list(DataLoader(data, 4, sampler=RandomSampler(data, replacement=True, num_samples=40), check_duplicates=True))


@pytest.mark.parametrize("method", ["multiprocessing", "thread"])
def test_a_state_knows_what_was_delivered_out_of_order(method: Any) -> None:
    def get_slowly(index: int) -> int:
        time.sleep(0 if index else 0.2)  # Sample 0 is the slowest.
        return index

    def make() -> DataLoader[Any]:
        return DataLoader(Called(get_slowly, 24), 2, num_workers=2, worker_method=method, in_order=False)

    for num_received in (1, 7):
        loader, resumed = make(), make()
        received = flatten(islice(loader, num_received))
        resumed.load_state_dict(loader.state_dict())
        assert 0 not in received or num_received > 1
        assert sorted(received + flatten(resumed)) == list(range(24))


def test_worker_processes_are_torchs_workers_with_its_seeds_whatever_the_dataset_seeds_on_import() -> None:
    def find(index: int) -> Any:
        ours, torchs = shardio.get_worker_info(), torch.utils.data.get_worker_info()
        return ours is torchs, None if ours is None else ours.id

    for num_workers in (0, 2):
        seen = list(DataLoader(Called(find, 8), None, num_workers=num_workers))
        assert seen == [[True, index % 2 if num_workers else None] for index in range(8)]

    def draw(loader: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        options = {"num_workers": 2, "multiprocessing_context": forkserver_context(), "generator": generator}
        return torch.cat(list(loader(Sent(seed_on_import), **options))).tolist()

    drawn = draw(DataLoader)
    assert drawn == draw(torch.utils.data.DataLoader)
    assert len(set(drawn)) == 4


_DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


def round_trip(value: Any, num_bytes: int) -> tuple[Any, bool]:
    own = list[Memory]()

    def make_memory(size: int) -> Memory:
        own.append(np.zeros(size, np.uint8))
        return own[-1]

    memory = np.zeros(num_bytes, np.uint8)
    parcel = pack(value, Arena(memory) if num_bytes else None, make_memory)
    source = memory if parcel.is_in_buffer else (own or [memory])[0]
    pieces = [None if each.content is not None else source[slice(*each.span)] for each in parcel.pieces]
    return unpack(parcel, pieces), parcel.is_in_buffer


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 40), max_size=4))
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(draw(st.sampled_from(_DTYPES)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    for dim in range(tensor.ndim):
        tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))),)]
    if tensor.numel() and tensor.ndim and draw(st.booleans()):
        tensor = tensor[:1].expand(draw(st.integers(0, 5)), *tensor.shape[1:])
    return tensor


@given(st.lists(tensors(), max_size=4), st.sampled_from([0, MIN_BYTES, 1 << 20]))
def test_tensors_keep_their_contents_dtypes_and_strides(values: list[torch.Tensor], num_bytes: int) -> None:
    found, _ = round_trip(values, num_bytes)
    for one, other in zip(values, found, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)


ARRAY = np.arange(5000)
STRUCTURES: dict[str, Any] = {
    **{kind: [make(index) for index in range(3)] for kind, make in VALUES.items()},
    "sliced array": [np.ascontiguousarray(VALUES["sliced array"](index)) for index in range(3)],  # As if pickled.
    "ends of one array": [torch.from_numpy(ARRAY[:10]), torch.from_numpy(ARRAY)],
    "an array and its tensor": [torch.from_numpy(ARRAY), ARRAY[:600]],
}


def test_tensors_that_share_memory_share_it_again_and_are_freed_without_the_collector_of_cycles() -> None:
    base = torch.arange(5000.0)
    parts = [base[:2], base[:3000]]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    found, _ = round_trip({"evens": base[::2], "tail": base[4000:], "other": base.clone(), "nested": nested}, 1 << 20)
    found["evens"][2000] = -1
    assert (found["tail"][0], found["other"][4000]) == (-1, 4000)
    assert describe(list(found["nested"].unbind())) == describe(parts)

    memory = np.zeros(1 << 16, np.uint8)
    parcel = pack([torch.ones(3000), "text"], Arena(memory), lambda size: np.zeros(size, np.uint8))
    piece = memory[slice(*parcel.pieces[0].span)]
    watched = weakref.ref(piece)
    with without_collector():
        found = unpack(parcel, [piece])
        del piece
        assert watched() is not None
        del found
        assert watched() is None


def test_what_lies_in_the_arena_is_not_copied_and_what_has_a_gradient_is_put_there() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    arena = Arena(memory)
    taken = arena.take(8000)
    assert taken is not None
    tensor = torch.from_numpy(taken).view(torch.float64).fill_(0.5)
    parcel = pack([tensor, torch.nn.Parameter(torch.ones(2000))], arena, lambda num_bytes: np.zeros(0, np.uint8))
    assert (parcel.is_in_buffer, [piece.span for piece in parcel.pieces]) == (True, [(0, 8000), (8000, 16000)])
    assert len(parcel.pickle.content) < MIN_BYTES
    assert memory[:8000].view(np.float64).tolist() == [0.5] * 1000


@pytest.mark.parametrize("name", STRUCTURES)
def test_any_structure_is_the_same_and_what_does_not_fit_gets_memory_of_its_own(name: str) -> None:
    for num_bytes in (0, 1 << 20):
        assert describe(round_trip(STRUCTURES[name], num_bytes)[0]) == describe(STRUCTURES[name])
    two = [torch.ones(3000), torch.zeros(3000)]
    assert [round_trip(two, num_bytes)[1] for num_bytes in (24000 + 64, 16000, 0)] == [True, False, False]
    assert describe(round_trip(two, 16000)[0]) == describe(two)


def test_other_values_are_pickled_but_tensors_within_a_graph_of_gradients_refused_as_by_torchs_queues() -> None:
    for value in (
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(5000, requires_grad=True),
        torch.eye(90).to_sparse(),
        torch.ones(3000, dtype=torch.complex64).conj(),
        np.broadcast_to(np.float64(1.5), (30, 40)),
        np.array(["text", None], object),
        np.array([1], ">i4"),
        {1, 2},
    ):
        found, _ = round_trip(value, 1 << 16)
        assert (type(found), str(found)) == (type(value), str(value))
    with pytest.raises(RuntimeError, match=r"needs a gradient and is not a leaf.*call detach\(\)"):
        round_trip([torch.ones(3, requires_grad=True) * 2], 0)


NUM_BYTES = 100 << 20


class Large(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.array = np.arange(NUM_BYTES // 8)
        self.names = SharedList([(f"name {number}", number) for number in range(1000)])
        self.tensor = torch.zeros(10).share_memory_()
        self.value = multiprocessing.get_context("spawn").Value("i", 0)
        self.frozen = np.arange(1000)
        self.frozen.flags.writeable = False
        self.num_pickled = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.array[index] = -index  # The worker writes to its own copy of the page.
        with self.value.get_lock():
            self.value.value += 1
        self.tensor[index % 10] += 1
        return self.names[index], int(self.array[index + 1000]), _read_copied_bytes(), self.frozen.flags.writeable

    def __getstate__(self) -> dict[str, Any]:
        self.num_pickled += 1
        return self.__dict__


def _read_copied_bytes() -> int:
    """Return the number of bytes of the job's memory that this process has copied."""
    mapped = [part for part in Path("/proc/self/smaps").read_text().split("VmFlags") if "memfd:shardio" in part]
    return sum(1024 * int(re.findall(r"Private_Dirty: +(\d+) kB", part)[0]) for part in mapped)


def test_a_dataset_is_pickled_once_and_its_arrays_are_not_copied() -> None:
    dataset = Large()
    context = forkserver_context()
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context=context, collate_fn=as_list)
    received = [sample for batch in loader for sample in batch]
    assert [(*sample[:2], sample[3]) for sample in received] == [((f"name {n}", n), n + 1000, False) for n in range(12)]
    assert (dataset.num_pickled, dataset.value.value, int(dataset.tensor.sum())) == (1, 12, 12)
    assert dataset.array[:12].tolist() == list(range(12))
    assert all(0 < num_bytes < NUM_BYTES // 100 for *_, num_bytes, _ in received)


@dataclass
class Holder:
    value: Any

    def get(self) -> Any:
        return self.value


class Sent:
    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))

    def __reduce__(self) -> Any:
        return self.load, ()


def seed_on_import() -> Sent:
    torch.manual_seed(0)
    return Sent(seed_on_import)


def refuse() -> None:
    raise ImportError("no such module here")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (lambda: 3, "dataset.value"),
        ([1, {"a": (2, threading.Lock())}], "dataset.value[1]['a'][1]"),
        (partial(Holder, Holder(threading.Lock())), "dataset.value.args[0].value"),
        (Holder(Holder(threading.Lock())).get, "dataset.value.__self__.value.value"),
    ],
    ids=["lambda", "nested", "partial", "method"],
)
def test_the_error_names_the_attribute_that_cannot_be_pickled_and_no_process_is_left(value: Any, path: str) -> None:
    before, context = set(multiprocessing.active_children()), forkserver_context()
    loader = DataLoader(Holder(value), sampler=[0], num_workers=2, collate_fn=as_list, multiprocessing_context=context)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as caught:
        iter(loader)
    assert f"({path} cannot be pickled, but worker processes that are not forked receive" in str(caught.value)
    assert "worker_method='thread' or multiprocessing_context='fork'" in str(caught.value)
    del caught
    gc.collect()
    assert set(multiprocessing.active_children()) == before


def test_a_worker_that_cannot_load_the_dataset_says_so() -> None:
    with pytest.raises(ImportError, match="no such module here") as caught:
        next(iter(DataLoader(Sent(refuse), num_workers=1, multiprocessing_context=forkserver_context())))
    assert "while loading the dataset in a worker process" in caught.value.__notes__
