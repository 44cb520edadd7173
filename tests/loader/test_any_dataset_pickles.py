"""Values that go to workers of any dataset or come back are the same values, at little cost."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import re
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from hypothesis import given, strategies as st

from shardio import DataLoader, SharedList
from shardio.loader.buffers import MIN_BYTES
from shardio.loader.pickles import Arena, Memory, pack, unpack
from tests.loader.programs import VALUES, as_list, describe
from tests.processes import forkserver_context

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


def test_tensors_of_one_array_may_end_at_different_bytes() -> None:
    array = np.arange(5000)
    for value in ([torch.from_numpy(array[:10]), torch.from_numpy(array)], [torch.from_numpy(array), array[:600]]):
        found, _ = round_trip(value, 1 << 20)
        assert describe(found) == describe(value)


@pytest.mark.parametrize("kind", sorted(VALUES))
def test_any_structure_is_the_same(kind: str) -> None:
    value = [VALUES[kind](index) for index in range(3)]
    if kind == "sliced array":
        value = [np.ascontiguousarray(array) for array in value]  # As if pickled.
    for num_bytes in (0, 1 << 20):
        assert describe(round_trip(value, num_bytes)[0]) == describe(value)


def test_tensors_that_share_memory_share_it_again() -> None:
    base = torch.arange(5000.0)
    value = {"evens": base[::2], "tail": base[4000:], "other": base.clone()}
    found, _ = round_trip(value, 1 << 20)
    found["evens"][2000] = -1
    assert found["tail"][0] == -1
    assert found["other"][4000] == 4000


def test_what_lies_in_the_arena_is_not_copied() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    arena = Arena(memory)
    taken = arena.take(8000)
    assert taken is not None
    tensor = torch.from_numpy(taken).view(torch.float64)
    tensor.fill_(0.5)
    parcel = pack([tensor, torch.ones(2000)], arena, lambda num_bytes: np.zeros(0, np.uint8))
    assert parcel.is_in_buffer
    spans = [piece.span for piece in parcel.pieces]
    assert spans == [(0, 8000), (8000, 16000)]
    assert memory[:8000].view(np.float64).tolist() == [0.5] * 1000


def test_what_does_not_fit_gets_memory_of_its_own() -> None:
    value = [torch.ones(3000), torch.zeros(3000)]
    for num_bytes, fits in ((24000 + 64, True), (16000, False), (0, False)):
        found, is_in_buffer = round_trip(value, num_bytes)
        assert is_in_buffer == fits
        assert describe(found) == describe(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(5000, requires_grad=True),
        torch.eye(90).to_sparse(),
        torch.ones(3000, dtype=torch.complex64).conj(),
        np.broadcast_to(np.float64(1.5), (30, 40)),
        np.array(["text", None], object),
        np.array([1], ">i4"),
        {1, 2},
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_pickled(value: Any) -> None:
    found, _ = round_trip(value, 1 << 16)
    assert type(found) is type(value)
    assert str(found) == str(value)


def test_nested_tensors_keep_their_parts() -> None:
    parts = [torch.ones(2), torch.arange(3000.0)]
    found, _ = round_trip(torch.nested.nested_tensor(parts, layout=torch.jagged), 1 << 16)
    assert describe(list(found.unbind())) == describe(parts)


def test_tensors_within_a_graph_of_gradients_are_refused_as_by_torchs_queues() -> None:
    with pytest.raises(RuntimeError, match=r"needs a gradient and is not a leaf.*call detach\(\)"):
        round_trip([torch.ones(3, requires_grad=True) * 2], 0)


def test_the_memory_of_other_values_is_not_pickled() -> None:
    parcel = pack(
        torch.nn.Parameter(torch.ones(5000)), Arena(np.zeros(1 << 16, np.uint8)), lambda size: np.zeros(size, np.uint8)
    )
    assert parcel.is_in_buffer
    assert len(parcel.pickle.content) < MIN_BYTES


def test_an_unpacked_value_is_freed_without_the_collector_of_cycles() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    parcel = pack([torch.ones(3000), "text"], Arena(memory), lambda size: np.zeros(size, np.uint8))
    piece = memory[slice(*parcel.pieces[0].span)]
    watched = weakref.ref(piece)
    gc.disable()
    try:
        found = unpack(parcel, [piece])
        del piece
        assert watched() is not None
        del found
        assert watched() is None
    finally:
        gc.enable()


NUM_BYTES = 100 << 20


class Large(torch.utils.data.Dataset[Any]):
    """A dataset with an array, a shared tensor, a lock and a value that all workers share."""

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
        self.array[index] = -index  # A copy of that page is this worker's.
        with self.value.get_lock():
            self.value.value += 1
        self.tensor[index % 10] += 1
        return self.names[index], int(self.array[index + 1000]), _read_copied_bytes(), self.frozen.flags.writeable

    def __getstate__(self) -> dict[str, Any]:
        self.num_pickled += 1
        return self.__dict__


def _read_copied_bytes() -> int:
    """Return how much of the job's memory this process has copies of; -1 if it has not mapped any."""
    parts = Path("/proc/self/smaps").read_text().split("VmFlags")
    mapped = [part for part in parts if "memfd:shardio" in part]
    return sum(1024 * int(re.findall(r"Private_Dirty: +(\d+) kB", part)[0]) for part in mapped) if mapped else -1


def test_a_dataset_is_pickled_once_and_its_arrays_are_not_copied() -> None:
    dataset = Large()
    context = forkserver_context()
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context=context, collate_fn=as_list)
    received = [sample for batch in loader for sample in batch]
    assert [sample[:2] for sample in received] == [((f"name {n}", n), n + 1000) for n in range(12)]
    assert not any(is_writable for *_, is_writable in received)
    assert dataset.num_pickled == 1
    assert dataset.array[:12].tolist() == list(range(12))
    assert dataset.value.value == 12
    assert int(dataset.tensor.sum()) == 12
    assert all(0 < num_bytes < NUM_BYTES // 100 for *_, num_bytes, _ in received)


class Seeding:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return float(torch.rand(()))

    def __reduce__(self) -> Any:
        return _seed, ()


def _seed() -> Seeding:
    torch.manual_seed(0)
    return Seeding()


def test_workers_have_torchs_seeds_whatever_the_dataset_seeds_on_import() -> None:
    def draw(loader: Any) -> Any:
        generator = torch.Generator().manual_seed(1)
        options = {"num_workers": 2, "multiprocessing_context": forkserver_context(), "generator": generator}
        return torch.cat(list(loader(Seeding(), **options))).tolist()

    drawn = draw(DataLoader)
    assert drawn == draw(torch.utils.data.DataLoader)
    assert len(set(drawn)) == 4


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


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
def test_the_error_names_the_attribute_that_cannot_be_pickled(value: Any, path: str) -> None:
    context = forkserver_context()
    loader = DataLoader(Holder(value), sampler=[0], num_workers=1, collate_fn=as_list, multiprocessing_context=context)
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)) as caught:
        iter(loader)
    assert f"({path} cannot be pickled, but worker processes that are not forked receive" in str(caught.value)
    assert "worker_method='thread' or multiprocessing_context='fork'" in str(caught.value)


def test_a_loader_whose_dataset_cannot_be_sent_leaves_no_process() -> None:
    before = set(multiprocessing.active_children())
    loader = DataLoader([threading.Lock()], num_workers=2, multiprocessing_context=forkserver_context())
    with pytest.raises(TypeError, match=r"dataset\[0\] cannot be pickled"):
        iter(loader)
    gc.collect()
    assert set(multiprocessing.active_children()) == before


class Unwilling:
    def __len__(self) -> int:
        return 4

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ImportError("no such module here")


def test_a_worker_that_cannot_load_the_dataset_says_so() -> None:
    with pytest.raises(ImportError, match="no such module here") as caught:
        next(iter(DataLoader(Unwilling(), num_workers=1, multiprocessing_context=forkserver_context())))
    assert "while loading the dataset in a worker process" in caught.value.__notes__
