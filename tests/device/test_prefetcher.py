"""DevicePrefetcher prepares images, keeps everything else, and passes on order, errors, epoch and state."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.data

from shardio import DataLoader
from shardio.device import DevicePrefetcher
from shardio.device.prefetcher import normalise_in_one_kernel, normalise_in_steps
from shardio.libraries import import_library
from tests.device.late_stream import prefetch_late
from tests.device.loaders import CountingLoader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Labelled(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor
    names: list[str]


def _images(count: int = 4, height: int = 6, width: int = 5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)


def _pass(batch: Any, **options: Any) -> Any:
    (passed,) = DevicePrefetcher([batch], "cpu", **options)
    return passed


@pytest.mark.parametrize("channels_last", [True, False])
def test_every_value_is_normalised_by_the_formula(channels_last: bool) -> None:
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(2, 3, 1, 1)
    images = _pass(values, normalize=(MEAN, STD), channels_last=channels_last)
    mean, std = (np.array(figures, dtype=np.float64).reshape(3, 1, 1) for figures in (MEAN, STD))
    expected = (values.numpy().astype(np.float64) / 255 - mean) / std
    assert images.dtype == torch.float32
    np.testing.assert_allclose(images.numpy().astype(np.float64), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_normalised_images_have_the_requested_dtype(dtype: torch.dtype) -> None:
    batch = _images()
    images = _pass(batch, normalize=(MEAN, STD), dtype=dtype)
    assert images.dtype == dtype
    mean, std = (torch.tensor(figures, dtype=torch.float64).reshape(3, 1, 1) for figures in (MEAN, STD))
    expected = ((batch.double() / 255 - mean) / std).float().to(dtype)
    torch.testing.assert_close(images, expected, rtol=torch.finfo(dtype).eps * 2, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_dtype_alone_casts_without_scaling(dtype: torch.dtype) -> None:
    batch = _images()
    images = _pass(batch, dtype=dtype)
    assert images.dtype == dtype
    assert torch.equal(images, batch.to(dtype))


def test_without_normalize_and_dtype_bytes_stay_bytes() -> None:
    batch = _images()
    images = _pass(batch)
    assert images.dtype == torch.uint8
    assert torch.equal(images, batch)


@pytest.mark.parametrize("options", [{}, {"normalize": (MEAN, STD)}, {"dtype": torch.float16}])
def test_images_have_the_requested_memory_format(options: dict[str, Any]) -> None:
    for batch in (_images(), _images().contiguous(memory_format=torch.channels_last)):
        last = _pass(batch, channels_last=True, **options)
        first = _pass(batch, channels_last=False, **options)
        assert last.is_contiguous(memory_format=torch.channels_last)
        assert first.is_contiguous()
        assert not first.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(last, first)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4),
        torch.arange(4, dtype=torch.uint8),
        torch.arange(60, dtype=torch.uint8).reshape(3, 4, 5),
        torch.arange(120, dtype=torch.uint8).reshape(1, 2, 3, 4, 5),
        torch.rand(2, 3, 4, 5),
        torch.arange(120).reshape(2, 3, 4, 5),
        torch.ones(2, 3, 4, 5, dtype=torch.bool),
        torch.tensor(7, dtype=torch.uint8),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)}",
)
def test_only_batches_of_uint8_images_change(tensor: torch.Tensor) -> None:
    images, passed = _pass((_images(), tensor), normalize=(MEAN, STD), dtype=torch.float16)
    assert images.dtype == torch.float16
    assert passed.dtype == tensor.dtype
    assert passed.stride() == tensor.stride()
    assert torch.equal(passed, tensor)


def test_nested_batches_keep_their_types_and_other_values() -> None:
    marker = object()
    labelled = Labelled(_images(), torch.arange(4), ["a", "b"])
    batch = {
        "tuple": (_images(), "text", 3, None, b"bytes", marker),
        "list": [_images(), [1.5, (_images(),)]],
        "named": labelled,
        "ordered": OrderedDict(b=_images(), a=torch.arange(2)),
        "array": np.arange(3),
    }
    passed = _pass(batch, dtype=torch.float32)
    assert type(passed) is dict
    assert list(passed) == list(batch)
    assert type(passed["tuple"]) is tuple
    assert passed["tuple"][1:] == ("text", 3, None, b"bytes", marker)
    assert type(passed["list"]) is list
    assert type(passed["list"][1]) is list
    assert type(passed["list"][1][1]) is tuple
    assert type(passed["named"]) is Labelled
    assert torch.equal(passed["named"].labels, torch.arange(4))
    assert passed["named"].names == ["a", "b"]
    assert type(passed["ordered"]) is OrderedDict
    assert list(passed["ordered"]) == ["b", "a"]
    assert torch.equal(passed["array"], torch.arange(3))
    for image in (passed["tuple"][0], passed["list"][0], passed["list"][1][1][0], passed["named"].images):
        assert torch.equal(image, _images().float())


def test_the_loaders_own_tensors_stay_unchanged() -> None:
    batch = _images()
    before = batch.clone()
    _pass(batch, normalize=(MEAN, STD))
    assert torch.equal(batch, before)


@pytest.mark.parametrize("depth", [1, 2, 5, 50])
def test_each_batch_arrives_once_and_in_order_in_every_epoch(depth: int) -> None:
    batches = [torch.full((2, 3, 4, 4), number, dtype=torch.uint8) for number in range(20)]
    prefetcher = DevicePrefetcher(CountingLoader(batches), "cpu", depth=depth)
    for _ in range(3):
        assert [int(batch[0, 0, 0, 0]) for batch in prefetcher] == list(range(20))


def test_an_epoch_that_was_left_early_does_not_disturb_the_next() -> None:
    prefetcher = DevicePrefetcher([torch.tensor(number) for number in range(9)], "cpu")
    for batch in prefetcher:
        if batch == 3:
            break
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
    gc.disable()  # The last reference ends them: the collector may come much later, or in a forked process.
    try:
        received = DevicePrefetcher(loader_class(range(8), batch_size=2, num_workers=1), "cpu")
        assert [batch.tolist() for batch in received] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert [iterator() for iterator in iterators] == [None]
    finally:
        gc.enable()


def test_the_length_is_the_loaders() -> None:
    assert len(DevicePrefetcher(CountingLoader([1, 2, 3]), "cpu")) == 3
    with pytest.raises(TypeError, match="len"):
        len(DevicePrefetcher(iter([1, 2]), "cpu"))


def test_the_epoch_and_the_state_go_to_the_loader_and_come_from_it() -> None:
    loader = CountingLoader([torch.tensor(number) for number in range(6)])
    prefetcher = DevicePrefetcher(loader, "cpu")
    prefetcher.set_epoch(4)
    assert loader.epoch == 4
    batches = iter(prefetcher)
    assert [int(next(batches)) for _ in range(2)] == [0, 1]
    state = prefetcher.state_dict()
    assert state == {"epoch": 4, "num_given": 2}

    other = DevicePrefetcher(CountingLoader(loader.batches), "cpu")
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert [int(batch) for batch in other] == [2, 3, 4, 5]


def test_set_epoch_does_nothing_for_a_loader_without_epochs() -> None:
    prefetcher = DevicePrefetcher([torch.tensor(1)], "cpu")
    prefetcher.set_epoch(3)
    assert [int(batch) for batch in prefetcher] == [1]


def test_an_error_of_the_loader_is_raised_after_the_batches_before_it() -> None:
    loader = CountingLoader([torch.tensor(1), torch.tensor(2)], error=KeyError("lost"))
    received = []
    with pytest.raises(KeyError, match="lost"):  # noqa: PT012  # what was received before counts, too
        for batch in DevicePrefetcher(loader, "cpu"):
            received.append(int(batch))  # noqa: PERF401  # as above
    assert received == [1, 2]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_normalised_images_need_a_floating_point_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="normalize yields fractions, which dtype="):
        DevicePrefetcher([], "cpu", normalize=(MEAN, STD), dtype=dtype)


@pytest.mark.parametrize("late", [False, True])
def test_masks_stay_unchanged(late: bool) -> None:
    import_library("torchvision")
    tv_tensors = pytest.importorskip("torchvision.tv_tensors")
    batch = (_images(), tv_tensors.Mask(_images(seed=1)), _images(seed=2)[:, :1], tv_tensors.Image(_images()))
    options: dict[str, Any] = {"normalize": (MEAN, STD)}
    (passed,) = prefetch_late([batch], **options)[0] if late else [_pass(batch, **options)]
    assert [tensor.dtype for tensor in passed] == [torch.float32, torch.uint8, torch.uint8, torch.float32]
    assert type(passed[1]) is tv_tensors.Mask
    assert torch.equal(passed[1], batch[1])
    assert torch.equal(passed[2], batch[2])
    assert torch.equal(passed[3].as_subclass(torch.Tensor), passed[0])


@pytest.mark.parametrize("depth", [0, -1])
def test_depth_must_be_at_least_one(depth: int) -> None:
    with pytest.raises(ValueError, match="depth must be at least 1"):
        DevicePrefetcher([], "cpu", depth=depth)


@pytest.mark.parametrize("std", [(0.2, 0.2, 0.0), (-0.2, 0.2, 0.2)])
def test_std_must_be_positive(std: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="std must be positive"):
        DevicePrefetcher([], "cpu", normalize=(MEAN, std))


def test_a_missing_cuda_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device .cuda:0. is not available, because torch finds no CUDA device: use"):
        DevicePrefetcher([], "cuda:0")


def test_the_default_device_is_the_best_available() -> None:
    assert DevicePrefetcher([], torch.device("cpu")).device == torch.device("cpu")
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert DevicePrefetcher([]).device.type == best


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_kernel_normalises_as_several_steps_do(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (3, 3, 20, 30), dtype=torch.uint8, generator=generator)
    scale, shift = torch.rand(3, 1, 1, generator=generator), torch.rand(3, 1, 1, generator=generator)
    for given in (images, images.to(memory_format=torch.channels_last), images[..., ::2]):
        one, other = (
            normalise(given, scale, shift, dtype, memory_format)
            for normalise in (normalise_in_one_kernel, normalise_in_steps)
        )
        assert one.dtype == other.dtype == dtype
        assert one.stride() == other.stride()
        tolerance = 0 if dtype in (torch.bfloat16, torch.float16) else 1e-6
        torch.testing.assert_close(one, other, rtol=tolerance, atol=0)
