"""Nested batches keep their types, and their arrays of numbers become tensors."""

from __future__ import annotations

from collections import Counter, UserDict, defaultdict
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

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
    """A mapping whose items copy.copy shares."""

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


def test_dataclasses_keep_their_type(pass_on: Any) -> None:
    images = torch.arange(4)
    batch = Frozen(images, Plain(images + 1, ["a"]))
    passed = pass_on(batch)
    assert (type(passed), type(passed.inner)) == (Frozen, Plain)
    assert passed is not batch
    assert torch.equal(passed.images, images)
    assert torch.equal(passed.inner.images, images + 1)
    assert (passed.inner.names, passed.inner.count) == (["a"], 3)


@pytest.mark.parametrize("kind", [dict, UserDict, MappingProxyType])
def test_mappings_keep_their_type(kind: Any, pass_on: Any) -> None:
    passed = pass_on(kind({"b": torch.arange(3), "a": "text"}))
    assert type(passed) is kind
    assert list(passed) == ["b", "a"]
    assert torch.equal(passed["b"], torch.arange(3))


def test_the_mappings_of_the_loader_stay_unchanged(pass_on: Any) -> None:
    counter, closed = Counter({"cat": 2, "dog": 1}), Closed({"a": torch.arange(3)})
    before = closed["a"]
    passed = pass_on((counter, defaultdict(list, {"images": [torch.arange(3)]}), closed))
    assert passed[0] == counter == {"cat": 2, "dog": 1}
    assert passed[1].default_factory is list
    assert torch.equal(passed[1]["images"][0], torch.arange(3))
    assert type(passed[2]) is Closed
    plain = {"a": before}
    doubled = map_tensors((plain, closed), lambda tensor: tensor * 2)
    assert all(torch.equal(mapping["a"], before * 2) for mapping in doubled)
    assert closed["a"] is plain["a"] is before


def test_an_object_that_moves_itself_moves_once(pass_on: Any) -> None:
    graph, sequence = pass_on((Graph(torch.arange(5)), pack_sequence([torch.arange(3.0), torch.arange(2.0)])))
    assert graph.moves == 1
    assert torch.equal(graph.nodes, torch.arange(5))
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
