"""Nested batches keep their types, and their arrays of numbers become tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shardio import DevicePrefetcher
from shardio.device.streams import map_tensors
from tests.device.late_stream import prefetch_late


@dataclass
class Plain:
    images: torch.Tensor
    names: list[str]
    count: int = field(default=3, init=False)


@dataclass(frozen=True, slots=True)
class Frozen:
    images: torch.Tensor
    inner: Plain


class Graph:
    def __init__(self, nodes: torch.Tensor, moves: int = 0) -> None:
        self.nodes, self.moves = nodes, moves

    def to(self, device: Any, *, non_blocking: bool = False) -> Graph:
        return Graph(self.nodes.to(device, non_blocking=non_blocking), self.moves + 1)


class Closed(MutableMapping[str, Any]):
    """A mapping that shares its items with a shallow copy."""

    def __init__(self, items: dict[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __setitem__(self, name: str, item: Any) -> None:
        self._items[name] = item

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


@pytest.fixture(params=[False, True], ids=["synchronous", "on a stream"])
def pass_on(request: pytest.FixtureRequest) -> Any:
    def pass_batch(batch: Any) -> Any:
        (passed,) = prefetch_late([batch])[0] if request.param else DevicePrefetcher([batch], "cpu")
        return passed

    return pass_batch


class Labeled(NamedTuple):
    images: torch.Tensor
    names: list[str]


IMAGES, OTHERS = torch.arange(3), ("text", 3, None, b"bytes", object())
NESTED: list[Any] = [
    Frozen(IMAGES, Plain(IMAGES + 1, ["a"])),
    Labeled(IMAGES, ["a", "b"]),
    (IMAGES, *OTHERS, [IMAGES, [1.5, (IMAGES,)]]),
    *(kind({"b": IMAGES, "a": "text"}) for kind in (dict, OrderedDict, UserDict, MappingProxyType)),
]


def assert_same(passed: Any, given: Any) -> None:
    """Check that two nested batches have the same types and values."""
    assert type(passed) is type(given)
    if isinstance(given, torch.Tensor):
        assert torch.equal(passed, given)
    elif is_dataclass(given):
        for each in fields(given):
            assert_same(getattr(passed, each.name), getattr(given, each.name))
    elif isinstance(given, Mapping):
        assert list(passed) == list(given)
        assert_same([*passed.values()], [*given.values()])
    elif isinstance(given, list | tuple):
        for one, other in zip(passed, given, strict=True):
            assert_same(one, other)
    else:
        assert passed == given


@pytest.mark.parametrize("batch", NESTED, ids=lambda batch: type(batch).__name__)
def test_nested_batches_keep_their_types_and_values(batch: Any, pass_on: Any) -> None:
    passed = pass_on(batch)
    assert_same(passed, batch)
    assert passed is not batch


def test_the_mappings_of_the_loader_stay_unchanged(pass_on: Any) -> None:
    counter, closed, before = Counter({"cat": 2, "dog": 1}), Closed({"a": IMAGES}), IMAGES.clone()
    passed = pass_on((counter, defaultdict(list, {"images": [IMAGES]}), closed))
    assert passed[0] == counter == {"cat": 2, "dog": 1}
    assert_same(passed[1], defaultdict(list, {"images": [IMAGES]}))
    assert passed[1].default_factory is list
    plain = {"a": closed["a"]}
    doubled = map_tensors((plain, closed), lambda tensor: tensor * 2)
    assert_same(doubled, ({"a": before * 2}, Closed({"a": before * 2})))
    assert_same(passed[2], closed)
    assert closed["a"] is plain["a"] is IMAGES
    assert torch.equal(IMAGES, before)


def test_an_object_that_moves_itself_moves_once(pass_on: Any) -> None:
    graph, sequence = pass_on((Graph(IMAGES), pack_sequence([torch.arange(3.0), torch.arange(2.0)])))
    assert_same([graph.moves, graph.nodes], [1, IMAGES])
    assert type(sequence) is PackedSequence
    assert sequence.batch_sizes.tolist() == [2, 2, 1]
    assert map_tensors([graph], torch.clone)[0] is graph, "there is no function for it"


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "float16", "float32", "float64", "bool", "complex64"])
def test_arrays_of_numbers_become_tensors(dtype: str, pass_on: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    for given in (array, array[:, ::2], array.T):
        passed = pass_on({"array": given})["array"]
        assert isinstance(passed, torch.Tensor)
        np.testing.assert_array_equal(passed.numpy(), given)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array([{}, None], dtype=object),
        np.arange(3, dtype=">i4"),
        np.arange(3).astype("longdouble"),
        np.array("2026-01-01", dtype="datetime64[D]"),
        np.zeros(2, [("x", "i4")]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_that_torch_does_not_support_are_kept(array: Any, pass_on: Any) -> None:
    assert pass_on([array])[0] is array


def test_read_only_arrays_become_writable_tensors(pass_on: Any) -> None:
    array = np.arange(5)
    array.flags.writeable = False
    passed = pass_on(array)
    passed += 1
    assert array.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(0, 3),
        torch.tensor(5),
        torch.ones(2, 3, dtype=torch.bool),
        torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
        torch.arange(24).reshape(2, 3, 4)[:, ::2],
        torch.zeros(2, 3, 4, 4, dtype=torch.uint8).contiguous(memory_format=torch.channels_last),
        torch.tensor([1 + 2j, 3j]),
        torch.arange(3).expand(4, 3),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)} {tensor.layout}",
)
def test_tensors_of_any_kind_arrive(tensor: torch.Tensor, pass_on: Any) -> None:
    passed = pass_on(tensor)
    assert (passed.dtype, passed.shape, passed.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(passed.to_dense(), tensor.to_dense())
