"""Buffers are pinned while the prefetcher uses them, once each, and no copy outlives what it reads."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardio import DataLoader, DevicePrefetcher, ShardDataset
from shardio.device import streams
from shardio.transforms import CenterCrop
from tests.device.late_stream import LateStream, prefetch_on

PERSISTENT: dict[str, Any] = {"batch_size": 2, "num_workers": 2, "persistent_workers": True}


class Registered:
    """Memory that was pinned in place. It is kept, so that no address is used again."""

    def __init__(self) -> None:
        self.blocks = list[NDArray[np.uint8]]()

    def __call__(self, memory: NDArray[np.uint8]) -> None:
        self.blocks.append(memory)

    def includes(self, tensor: torch.Tensor) -> bool:
        return any(0 <= tensor.data_ptr() - block.ctypes.data < block.nbytes for block in self.blocks)


def make_loader(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, transform=CenterCrop(48), shuffle=True)
    return DataLoader(dataset, **{**PERSISTENT, **options})


def test_all_memory_of_watched_epochs_is_passed_on(packed: Path) -> None:
    loader, registered = make_loader(packed), Registered()
    with loader.watch_memory(registered):
        batches = iter(loader)
    assert all(registered.includes(images) for images, _ in batches)
    assert len({block.ctypes.data for block in registered.blocks}) == len(registered.blocks)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_other_epochs_have_other_memory(packed: Path, persistent_workers: bool) -> None:
    """A plain ``x.cuda(non_blocking=True)`` may be under way when a buffer is refilled, so it must not be pinned."""
    loader, registered = make_loader(packed, persistent_workers=persistent_workers), Registered()
    for _ in range(2):
        with loader.watch_memory(registered):
            batches = iter(loader)
        kept, _ = next(batches)
        assert registered.includes(kept)
        list(batches)
        for images, _ in loader:
            assert not registered.includes(images)


def test_a_loader_that_was_wrapped_once_is_iterated_plainly(packed: Path) -> None:
    loader, registered = make_loader(packed), Registered()
    prefetcher = prefetch_on(LateStream(0), loader, registered)
    assert len(list(prefetcher)) == len(loader)
    assert registered.blocks
    assert not any(registered.includes(images) for images, _ in loader)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_buffers_are_pinned_once_and_kept_for_all_epochs(packed: Path, depth: int) -> None:
    loader, registered = make_loader(packed, batch_size=1), Registered()
    prefetcher = prefetch_on(LateStream(0, laziness=0.9), loader, registered, depth=depth)
    numbers = list[int]()
    for _ in range(6):
        for batch in prefetcher:
            del batch
        numbers.append(len(registered.blocks))
    assert numbers[0] <= 2 + 2 + depth + 1
    assert numbers[2:] == numbers[2:3] * 4


def test_the_next_prefetcher_keeps_what_is_pinned(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``for epoch in …: for batch in DevicePrefetcher(loader): …``."""
    loader, registered = make_loader(packed, batch_size=1), Registered()
    monkeypatch.setattr(streams.Registration, "__call__", lambda _, memory: registered(memory))
    numbers = list[int]()
    for _ in range(5):
        prefetcher = prefetch_on(LateStream(0), loader, streams.Registration(torch.device("cuda", 0)))
        assert len(list(prefetcher)) == len(loader)
        numbers.append(len(registered.blocks))
    assert numbers[0]
    assert numbers[2:] == numbers[2:3] * 3


class Cudart:
    """CUDA's functions for pinned memory, which refuse or accept."""

    def __init__(self, status: int) -> None:
        self.status = status

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802  # CUDA's name
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Simulate torch's kernels on CUDA: the first one after an error raises it, and clears it."""
    launched = list[Any]()

    def launch(*size: int, device: Any) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: invalid argument")

    monkeypatch.setattr(torch, "zeros", launch)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    return launched


@pytest.mark.parametrize("status", [0, 1])
def test_the_error_of_a_refused_registration_is_cleared(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(status))
    streams.Registration(torch.device("cuda", 1))(np.zeros(4096, np.uint8))
    assert launched == [torch.device("cuda", 1)] * status


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("shardio.device.prefetcher.CudaStream", lambda device: device)
    assert DevicePrefetcher([], "cuda").device == torch.device("cuda", 3)
    assert DevicePrefetcher([], "cuda:1").device == torch.device("cuda", 1)
