"""DevicePrefetcher chooses its device and prepares images.

The prefetcher passes on everything else, including errors, the epoch and the state.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import shardio
from shardio import DataLoader
from shardio.device import DevicePrefetcher, choose_device
from shardio.device.streams import map_tensors
from shardio.device.tiles import normalize
from shardio.libraries import import_library
from shardio.train import TrainConfig
from tests.device.late_stream import CountingLoader, prefetch_late

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE: dict[str, Any] = {"normalize": (MEAN, STD)}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]


def make_images(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (4, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def pass_batch(batch: Any, *, late: bool = False, **options: Any) -> Any:
    (passed,) = prefetch_late([batch], **options)[0] if late else DevicePrefetcher([batch], "cpu", **options)
    return passed


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float64])
def test_every_value_is_normalized_by_the_formula(dtype: torch.dtype | None, channels_last: bool) -> None:
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(2, 3, 1, 1)
    before = values.clone()
    images = pass_batch(values, **NORMALIZE, dtype=dtype, channels_last=channels_last)
    assert images.dtype == (dtype or torch.float32)
    mean, std = (torch.tensor(figures, dtype=torch.float64).reshape(3, 1, 1) for figures in (MEAN, STD))
    expected = ((values.double() / 255 - mean) / std).float().to(images.dtype)
    eps = torch.finfo(images.dtype).eps * 2 if dtype else 0.0
    torch.testing.assert_close(images, expected, rtol=eps, atol=2e-6 if dtype else 1e-6)
    assert torch.equal(values, before), "the loader's own tensors stay unchanged"


@pytest.mark.parametrize("options", [{}, NORMALIZE, *({"dtype": dtype} for dtype in DTYPES)])
def test_images_have_the_requested_memory_format_and_dtype_alone_casts_without_scaling(options: Any) -> None:
    for batch in (make_images(), make_images().contiguous(memory_format=torch.channels_last)):
        last, first = (pass_batch(batch, channels_last=is_last, **options) for is_last in (True, False))
        assert last.is_contiguous(memory_format=torch.channels_last)
        assert first.is_contiguous()
        assert not first.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(last, first)
        if options is not NORMALIZE:
            assert last.dtype == options.get("dtype", torch.uint8)
            assert torch.equal(last, batch.to(last.dtype))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_kernel_normalizes_as_several_steps_do(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (3, 3, 20, 30), dtype=torch.uint8, generator=generator)
    scale, shift = torch.rand(3, 1, 1, generator=generator), torch.rand(3, 1, 1, generator=generator)
    for given in (images, images.to(memory_format=torch.channels_last), images[..., ::2]):
        arguments = given, scale, shift, dtype, memory_format
        one, other = (normalize(*arguments, in_one_kernel=is_one) for is_one in (True, False))
        assert one.dtype == other.dtype == dtype
        assert one.stride() == other.stride()
        tolerance = 0 if dtype in (torch.bfloat16, torch.float16) else 1e-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.arange(4), torch.arange(4, dtype=torch.uint8), torch.tensor(7, dtype=torch.uint8)),
        *(torch.arange(120, dtype=torch.uint8).reshape(shape) for shape in ((6, 4, 5), (1, 2, 3, 4, 5))),
        *(torch.rand(2, 3, 4, 5), torch.arange(120).reshape(2, 3, 4, 5), torch.ones(2, 3, 4, 5, dtype=torch.bool)),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}",
)
def test_only_batches_of_uint8_images_change(tensor: torch.Tensor) -> None:
    images, passed = pass_batch((make_images(), tensor), **NORMALIZE, dtype=torch.float16)
    assert images.dtype == torch.float16
    assert (passed.dtype, passed.stride()) == (tensor.dtype, tensor.stride())
    assert torch.equal(passed, tensor)


@pytest.mark.parametrize("late", [False, True])
def test_masks_stay_unchanged(late: bool) -> None:
    import_library("torchvision")
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    batch = (make_images(), tv_tensors.Mask(make_images(1)), make_images(2)[:, :1], tv_tensors.Image(make_images()))
    passed = pass_batch(batch, late=late, **NORMALIZE)
    assert [tensor.dtype for tensor in passed] == [torch.float32, torch.uint8, torch.uint8, torch.float32]
    assert type(passed[1]) is tv_tensors.Mask
    assert all(map(torch.equal, passed[1:3], batch[1:3]))
    assert torch.equal(passed[3].as_subclass(torch.Tensor), passed[0])


@pytest.mark.parametrize("late", [False, True])
def test_a_transform_takes_the_prepared_batch_and_returns_the_final_one(late: bool) -> None:
    images = torch.arange(24, dtype=torch.uint8).reshape(1, 2, 3, 4)

    def swap(batch: Any) -> Any:
        image, label = batch
        assert image.dtype == torch.float16
        return label, image.flip(-1)

    label, image = pass_batch((images, torch.tensor([3])), late=late, dtype=torch.float16, transform=swap)
    assert label.tolist() == [3]
    assert torch.equal(image, images.flip(-1).to(torch.float16))


@pytest.mark.parametrize("late", [False, True])
def test_an_error_of_the_loader_is_raised_after_the_batches_before_it(late: bool) -> None:
    loader = CountingLoader([torch.tensor(number) for number in range(5)], error=KeyError("lost"))
    received = []
    with pytest.raises(KeyError, match="lost"):  # noqa: PT012  # the batches before the error are checked
        for batch in prefetch_late(loader, depth=3)[0] if late else DevicePrefetcher(loader, "cpu"):
            received.append(int(batch))  # noqa: PERF401  # as above
    assert received == list(range(5))


@pytest.mark.parametrize("depth", [1, 50])
def test_each_batch_arrives_once_and_in_order_in_every_epoch(depth: int) -> None:
    prefetcher = DevicePrefetcher([torch.tensor(number) for number in range(9)], "cpu", depth=depth)
    for batch in prefetcher:
        if batch == 3:
            break
    prefetcher.set_epoch(3)  # A list has no epochs.
    for _ in range(2):
        assert [int(batch) for batch in prefetcher] == list(range(9))


@pytest.mark.parametrize("loader_class", [torch.utils.data.DataLoader, DataLoader])
def test_workers_end_with_the_epoch(loader_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    iterators = list[weakref.ref[Any]]()
    begin = loader_class.__iter__

    def watched(loader: Any) -> Any:
        iterator = begin(loader)
        iterators.append(weakref.ref(iterator))
        return iterator

    monkeypatch.setattr(loader_class, "__iter__", watched)
    gc.disable()  # The iterators must be freed with their last reference: the garbage collector may run much later.
    try:
        received = DevicePrefetcher(loader_class(range(8), batch_size=2, num_workers=1), "cpu")
        assert [batch.tolist() for batch in received] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert [iterator() for iterator in iterators] == [None]
    finally:
        gc.enable()


def test_length_epoch_and_state_are_those_of_the_loader() -> None:
    with pytest.raises(TypeError, match="len"):
        len(DevicePrefetcher(iter([1, 2]), "cpu"))
    loader = CountingLoader([torch.tensor(number) for number in range(6)])
    prefetcher, other = (DevicePrefetcher(each, "cpu") for each in (loader, CountingLoader(loader.batches)))
    assert len(prefetcher) == 6
    prefetcher.set_epoch(4)
    assert loader.epoch == 4
    batches = iter(prefetcher)
    assert [int(next(batches)) for _ in range(2)] == [0, 1]
    state = prefetcher.state_dict()
    assert state == {"epoch": 4, "num_given": 2}
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert [int(batch) for batch in other] == [2, 3, 4, 5]


def test_other_loaders_need_no_state() -> None:
    prefetcher = DevicePrefetcher([], "cpu")
    with pytest.warns(RuntimeWarning, match="list has no state"):
        assert prefetcher.state_dict() == {}
    with pytest.warns(RuntimeWarning, match="list has no state"):
        prefetcher.load_state_dict({})
    with pytest.raises(TypeError, match=r"list has no load_state_dict: wrap a shardio\.DataLoader"):
        prefetcher.load_state_dict({"epoch": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**NORMALIZE, "dtype": torch.uint8}, "normalize yields fractions, which dtype="),
        ({**NORMALIZE, "dtype": torch.bool}, "normalize yields fractions, which dtype="),
        *(({"depth": depth}, "depth must be at least 1") for depth in (0, -1)),
        *(({"normalize": (MEAN, (0.2, 0.2, std))}, "std must be positive") for std in (0.0, -0.2)),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DevicePrefetcher([], "cpu", **options)


# The device.


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "num_ranks", "expected"),
    [
        *((True, True, 1, "cuda"), (True, False, 2, "cuda"), (False, True, 1, "mps"), (False, False, 1, "cpu")),
        (False, True, 2, "cpu"),  # Ranks cannot share an MPS device.
    ],
)
def test_without_a_name_the_best_available_device_is_used(
    monkeypatch: pytest.MonkeyPatch, has_cuda: bool, has_mps: bool, num_ranks: int, expected: str
) -> None:
    assert DevicePrefetcher([]).device.type == choose_device().type
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert choose_device(num_ranks=num_ranks) == torch.device(expected)


@pytest.mark.parametrize(("name", "asked"), [("cpu", []), ("meta", []), ("mps", ["mps"]), ("cuda:0", ["cuda"])])
def test_torch_is_asked_only_about_the_named_type(monkeypatch: pytest.MonkeyPatch, name: str, asked: list[str]) -> None:
    found = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not found.append("cuda"))  # type: ignore[func-returns-value]
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: not found.append("mps"))  # type: ignore[func-returns-value]
    assert choose_device(name) == torch.device(name)
    assert found == asked
    assert choose_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "toaster"])
def test_a_device_that_torch_cannot_use_is_refused_everywhere(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    kind = name.partition(":")[0].upper()
    message = f"device '{name}' is not available, because torch finds no {kind} device: use 'cpu', or omit device"
    if name == "toaster":
        message = "device must be one that torch supports, such as 'cuda' or 'cpu', got 'toaster'"
    for use in (choose_device, lambda name: DevicePrefetcher([], name), lambda name: TrainConfig(device=name)):
        with pytest.raises(ValueError, match=message):
            use(name)


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("shardio.device.prefetcher.CudaStream", lambda device: device)
    assert DevicePrefetcher([], "cuda").device == torch.device("cuda", 3)
    assert DevicePrefetcher([], "cuda:1").device == torch.device("cuda", 1)


def test_only_one_file_chooses_a_device() -> None:
    package = Path(shardio.__file__).parent
    assert sum("mps.is_available" in path.read_text() for path in package.rglob("*.py")) == 1


# Nested batches keep their types, and their arrays of numbers become tensors.


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
    return partial(pass_batch, late=request.param)


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
def test_arrays_of_numbers_become_writable_tensors(dtype: str, pass_on: Any) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    expected = array.copy()
    for given in (array, array[:, ::2], array.T):
        passed = pass_on({"array": given})["array"]
        assert isinstance(passed, torch.Tensor)
        np.testing.assert_array_equal(passed.numpy(), given)
    array.flags.writeable = False
    pass_on(array).zero_()
    assert (array == expected).all()


@pytest.mark.parametrize(
    "array",
    [
        *(np.array(["a", "b"]), np.array([{}, None], dtype=object), np.arange(3, dtype=">i4")),
        *(np.arange(3).astype("longdouble"), np.array("2026-01-01", "datetime64[D]"), np.zeros(2, [("x", "i4")])),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_that_torch_does_not_support_are_kept(array: Any, pass_on: Any) -> None:
    assert pass_on([array])[0] is array


@pytest.mark.parametrize(
    "tensor",
    [
        *(torch.zeros(0, 3), torch.tensor(5), torch.ones(2, 3, dtype=torch.bool), torch.eye(3).to_sparse()),
        *(torch.arange(24).reshape(2, 3, 4).transpose(0, 2), torch.arange(24).reshape(2, 3, 4)[:, ::2]),
        torch.zeros(2, 3, 4, 4, dtype=torch.uint8).contiguous(memory_format=torch.channels_last),
        *(torch.tensor([1 + 2j, 3j]), torch.arange(3).expand(4, 3)),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)} {tensor.layout}",
)
def test_tensors_of_any_kind_arrive(tensor: torch.Tensor, pass_on: Any) -> None:
    passed = pass_on(tensor)
    assert (passed.dtype, passed.shape, passed.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(passed.to_dense(), tensor.to_dense())
