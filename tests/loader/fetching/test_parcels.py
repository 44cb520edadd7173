"""A value that is packed and unpacked is the same value, whatever is in it and wherever its memory is."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from shardio.loader.memory import MIN_BYTES
from shardio.loader.pickles import Arena, Memory, pack, unpack
from tests.loader.fetching.programs import VALUES, describe

_DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


def round_trip(value: Any, num_bytes: int) -> tuple[Any, bool]:
    """Return a value that was packed into an arena of some size, and whether it fitted."""
    own = list[Memory]()

    def make_memory(size: int) -> Memory:
        own.append(np.zeros(size, np.uint8))
        return own[-1]

    memory = np.zeros(num_bytes, np.uint8)
    pickled = pack(value, Arena(memory) if num_bytes else None, make_memory)
    source = memory if pickled.is_in_buffer else (own or [memory])[0]
    pieces = [None if each.content is not None else source[slice(*each.span)] for each in pickled.pieces]
    return unpack(pickled, pieces), pickled.is_in_buffer


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor with any strides, perhaps a view of a larger one."""
    shape = draw(st.lists(st.integers(0, 40), max_size=4))
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(draw(st.sampled_from(_DTYPES)))
    tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    for dim in range(tensor.ndim):
        tensor = tensor[(slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))),)]
    if tensor.numel() and tensor.ndim and draw(st.booleans()):
        tensor = tensor[:1].expand(draw(st.integers(0, 5)), *tensor.shape[1:])
    return tensor


@given(st.lists(tensors(), max_size=4), st.sampled_from([0, MIN_BYTES, 1 << 20]))
@settings(deadline=None)
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
@pytest.mark.parametrize("num_bytes", [0, 1 << 20])
def test_any_structure_is_the_same(kind: str, num_bytes: int) -> None:
    value = [VALUES[kind](index) for index in range(3)]
    if kind == "sliced array":
        value = [np.ascontiguousarray(array) for array in value]  # As if pickled.
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
    pickled = pack([tensor, torch.ones(2000)], arena, lambda num_bytes: np.zeros(0, np.uint8))
    assert pickled.is_in_buffer
    spans = [piece.span for piece in pickled.pieces]
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
    pickled = pack(
        torch.nn.Parameter(torch.ones(5000)), Arena(np.zeros(1 << 16, np.uint8)), lambda size: np.zeros(size, np.uint8)
    )
    assert pickled.is_in_buffer
    assert len(pickled.pickle.content) < MIN_BYTES


def test_an_unpacked_value_is_freed_without_the_collector_of_cycles() -> None:
    memory = np.zeros(1 << 16, np.uint8)
    pickled = pack([torch.ones(3000), "text"], Arena(memory), lambda size: np.zeros(size, np.uint8))
    piece = memory[slice(*pickled.pieces[0].span)]
    watched = weakref.ref(piece)
    gc.disable()
    try:
        found = unpack(pickled, [piece])
        del piece
        assert watched() is not None
        del found
        assert watched() is None
    finally:
        gc.enable()
