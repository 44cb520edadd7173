"""DevicePrefetcher on a real GPU: batches are copied on a separate stream and are never torn."""

from __future__ import annotations

import gc
import mmap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardio import DataLoader, ShardDataset
from shardio.device import DevicePrefetcher
from shardio.device.streams import Registration
from shardio.transforms import CenterCrop
from tests.device.late_stream import count_pinned_buffers

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NUM_BATCHES = 300


class _Batches:
    """A loader that makes each batch from its index, and keeps no references, so that memory is reused immediately."""

    def __init__(self, num_batches: int = NUM_BATCHES, *, is_pinned: bool = False) -> None:
        self.num_batches, self.is_pinned = num_batches, is_pinned

    def __len__(self) -> int:
        return self.num_batches

    def make(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        images = torch.randint(0, 256, (16, 3, 64, 64), dtype=torch.uint8, generator=generator)
        return images, torch.full((16,), number)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        for number in range(self.num_batches):
            batch = self.make(number)
            yield tuple(tensor.pin_memory() for tensor in batch) if self.is_pinned else batch


def _work_slowly(size: int = 2048) -> torch.Tensor:
    """Keep the current stream busy, so that the device reads a batch long after Python has released it."""
    matrix = torch.ones(size, size, device="cuda")
    for _ in range(4):
        matrix = matrix @ matrix / size
    return matrix.sum()


def _normalized(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(figures, dtype=torch.float64).reshape(3, 1, 1) for figures in NORMALIZE)
    return (images.double() / 255 - mean) / std


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize(("depth", "has_own_stream"), [(1, False), (2, False), (4, False), (2, True)])
def test_a_slow_consumer_that_frees_batches_gets_whole_ones(depth: int, has_own_stream: bool, is_pinned: bool) -> None:
    """The consumer's stream computes the sums only after slow work, when Python has already freed the batch."""
    loader, sums = _Batches(is_pinned=is_pinned), []
    stream = torch.cuda.Stream() if has_own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        for images, labels in DevicePrefetcher(loader, "cuda", depth=depth):
            _work_slowly()
            sums.append((images.sum(dtype=torch.int64), (images.int() * images.int()).sum(), labels.sum()))
            del images, labels
    stream.synchronize()
    expected = []
    for number in range(NUM_BATCHES):
        images, labels = loader.make(number)
        squares = images.int() * images.int()
        expected.append((int(images.sum(dtype=torch.int64)), int(squares.sum()), int(labels.sum())))
    assert [tuple(int(figure) for figure in figures) for figures in sums] == expected


def test_batches_equal_a_synchronous_copy() -> None:
    loader = _Batches()
    for number, (images, labels) in enumerate(DevicePrefetcher(loader, "cuda", normalize=NORMALIZE)):
        expected_images, expected_labels = loader.make(number)
        assert images.is_cuda
        assert labels.is_cuda
        assert images.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(images.cpu().double(), _normalized(expected_images), rtol=0, atol=1e-6)
        assert torch.equal(labels.cpu(), expected_labels)


def test_memory_does_not_grow_from_epoch_to_epoch() -> None:
    prefetcher, allocated = DevicePrefetcher(_Batches(50), "cuda", normalize=NORMALIZE), []
    for _ in range(4):
        for batch in prefetcher:
            del batch
        gc.collect()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1:] == allocated[:1] * 3


def _loader(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, fields=("image", "label"), transform=CenterCrop(64), shuffle=True)
    return DataLoader(dataset, batch_size=2, **options)


def test_each_buffer_is_pinned_once_and_copied_from_directly(packed: Path) -> None:
    loader = _loader(packed, num_workers=2, persistent_workers=True)
    prefetcher, made = DevicePrefetcher(loader, "cuda"), list[NDArray[np.uint8]]()
    register = prefetcher._register

    def note(memory: NDArray[np.uint8]) -> None:
        made.append(memory)  # The reference prevents reuse of the address.
        register(memory)

    prefetcher._register = note  # type: ignore[assignment]  # a Registration
    sizes = count_pinned_buffers(prefetcher)
    for _ in range(5):
        for _ in prefetcher:
            pass
    assert len({memory.ctypes.data for memory in made}) == len(made) <= 2 * (2 + 2 + prefetcher.depth + 1)
    assert all(torch.from_numpy(memory).is_pinned() for memory in made)
    assert all(num_bytes < 2 * 3 * 64 * 64 for num_bytes in sizes), "only labels"


@pytest.mark.parametrize(("is_wrapped", "pin_memory"), [(True, False), (True, True), (False, True)])
def test_a_loader_that_is_iterated_plainly_is_never_torn(packed: Path, is_wrapped: bool, pin_memory: bool) -> None:
    """Without a prefetcher, a loader pins batches only in torch's memory, which torch does not reuse too early.

    The buffer of a dropped batch must not be reused while a copy of it waits in a stream.
    """
    loader = _loader(packed, num_workers=2, persistent_workers=True, pin_memory=pin_memory)
    for _ in DevicePrefetcher(loader, "cuda") if is_wrapped else ():
        pass
    plain, stream = _loader(packed), torch.cuda.Stream()
    for epoch in range(1, 20):
        loader.set_epoch(epoch)
        plain.set_epoch(epoch)
        sums = []
        for images, _ in loader:
            assert images.is_pinned() == pin_memory
            with torch.cuda.stream(stream):
                _work_slowly()
                sums.append(images.to("cuda", non_blocking=True).long().square().sum())
            del images
        stream.synchronize()
        assert [int(figure) for figure in sums] == [int(images.long().square().sum()) for images, _ in plain]


def test_a_refused_registration_does_not_fail_the_next_kernel() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8)  # The memory begins at a page boundary.
    cudart, second_half = torch.cuda.cudart(), memory.ctypes.data + memory.nbytes // 2
    assert int(cudart.cudaHostRegister(second_half, memory.nbytes // 2, 0)) == 0
    try:
        assert not torch.from_numpy(memory).is_pinned()
        Registration(torch.device("cuda", torch.cuda.current_device()))(memory)  # CUDA rejects overlapping ranges.
        assert not torch.from_numpy(memory).is_pinned()
        assert int(torch.ones(5, device="cuda").sum()) == 5
    finally:
        assert int(cudart.cudaHostUnregister(second_half)) == 0


def test_the_stall_is_measured_on_the_device() -> None:
    resident = DevicePrefetcher([(torch.zeros(2),)] * 40, "cuda")
    for _ in resident:
        for _ in range(20):
            _work_slowly()
    torch.cuda.synchronize()
    busy_s = resident.stats().data_stall_s

    def load() -> Iterator[torch.Tensor]:
        for _ in range(10):
            time.sleep(0.1)
            yield torch.zeros(2)

    starving = DevicePrefetcher(load(), "cuda")
    for _ in starving:
        pass
    torch.cuda.synchronize()
    assert 0.5 < starving.stats().data_stall_s < starving.stats().loader_wait_s + 1
    assert busy_s < 0.5


def test_batches_arrive_whole_while_worker_processes_reuse_their_buffers(packed: Path) -> None:
    loader, plain = _loader(packed, num_workers=2, persistent_workers=True), _loader(packed)
    prefetcher = DevicePrefetcher(loader, "cuda", depth=3)
    for epoch in range(40):
        prefetcher.set_epoch(epoch)
        plain.set_epoch(epoch)
        sums = []
        for images, labels in prefetcher:
            _work_slowly(1024)
            sums.append((images.long().square().sum(), labels.sum()))
            del images, labels
        expected = [(int(images.long().square().sum()), int(labels.sum())) for images, labels in plain]
        assert [(int(images), int(labels)) for images, labels in sums] == expected


def test_reserved_memory_does_not_grow_when_the_program_runs_ahead() -> None:
    prefetcher, reserved = DevicePrefetcher(_Batches(30), "cuda", normalize=NORMALIZE), []
    for _ in range(100):
        for images, _ in prefetcher:
            _work_slowly()
            del images
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[50:]) <= 2 * max(reserved[:10]), "it does not grow with the number of epochs"
