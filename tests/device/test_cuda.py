"""DevicePrefetcher on a real GPU: batches cross on a stream of their own and are never torn."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardio import DataLoader, ShardDataset
from shardio.device import DevicePrefetcher
from shardio.transforms import CenterCrop
from tests.device.loaders import CountingLoader

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NUM_BATCHES = 300


class _Batches:
    """Makes each batch anew from its number, so that memory is freed and taken again at once."""

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
    """Keep the device's current stream busy, so that it reads a batch long after Python let go of it."""
    matrix = torch.ones(size, size, device="cuda")
    for _ in range(4):
        matrix = matrix @ matrix / size
    return matrix.sum()


def _normalised(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(figures, dtype=torch.float64).reshape(3, 1, 1) for figures in NORMALIZE)
    return (images.double() / 255 - mean) / std


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_slow_consumer_that_frees_batches_at_once_sees_each_batch_whole(depth: int, is_pinned: bool) -> None:
    """The sums are taken behind slow work in the consumer's stream, after the batch was freed in Python."""
    loader, sums = _Batches(is_pinned=is_pinned), []
    for images, labels in DevicePrefetcher(loader, "cuda", depth=depth):
        _work_slowly()
        sums.append((images.sum(dtype=torch.int64), (images.int() * images.int()).sum(), labels.sum()))
        del images, labels
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
        torch.testing.assert_close(images.cpu().double(), _normalised(expected_images), rtol=0, atol=1e-6)
        assert torch.equal(labels.cpu(), expected_labels)


def test_batches_that_are_kept_stay_as_they_were() -> None:
    loader = _Batches(60)
    kept = list(DevicePrefetcher(loader, "cuda", depth=3))
    for number, (images, labels) in enumerate(kept):
        expected = loader.make(number)
        assert torch.equal(images.cpu(), expected[0])
        assert torch.equal(labels.cpu(), expected[1])


def test_a_consumer_on_another_stream_sees_each_batch_whole() -> None:
    loader, sums, stream = _Batches(), [], torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for images, _ in DevicePrefetcher(loader, "cuda"):
            _work_slowly()
            sums.append(images.sum(dtype=torch.int64))
            del images
    stream.synchronize()
    expected = [int(loader.make(number)[0].sum(dtype=torch.int64)) for number in range(NUM_BATCHES)]
    assert [int(figure) for figure in sums] == expected


def test_memory_does_not_grow_from_epoch_to_epoch() -> None:
    prefetcher, allocated = DevicePrefetcher(_Batches(50), "cuda", normalize=NORMALIZE), []
    for _ in range(4):
        for batch in prefetcher:
            del batch
        gc.collect()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1:] == allocated[:1] * 3


@pytest.mark.parametrize("depth", [1, 3])
def test_the_state_is_that_of_the_last_batch_that_was_handed_out(depth: int) -> None:
    """However many more are under way."""
    prefetcher = DevicePrefetcher(CountingLoader([torch.tensor(i) for i in range(9)]), "cuda", depth=depth)
    for number, batch in enumerate(prefetcher):
        assert int(batch) == number
        assert prefetcher.state_dict()["num_given"] == number + 1


def test_the_epoch_that_is_set_after_an_epoch_shows_in_the_state() -> None:
    prefetcher = DevicePrefetcher(CountingLoader([torch.tensor(i) for i in range(5)]), "cuda")
    list(prefetcher)
    prefetcher.set_epoch(7)
    assert prefetcher.state_dict() == {"epoch": 7, "num_given": 0}


def test_what_is_no_tensor_stays_and_what_the_loader_raises_arrives() -> None:
    batches: list[Any] = [{"key": ["a", "b"], "image": torch.zeros(2, 3, 4, 4, dtype=torch.uint8)}]
    received = []
    loader = CountingLoader(batches, error=KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):  # noqa: PT012  # what was received before counts, too
        for batch in DevicePrefetcher(loader, "cuda", depth=1):
            received.append(batch)  # noqa: PERF402  # as above
    assert received[0]["key"] == ["a", "b"]
    assert received[0]["image"].is_cuda


def _loader(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, fields=("image", "label"), transform=CenterCrop(64), shuffle=True)
    return DataLoader(dataset, batch_size=2, **options)


def test_slots_are_pinned_once_each_and_nothing_else_is_copied_on_the_way(packed: Path) -> None:
    loader = _loader(packed, num_workers=2, persistent_workers=True)
    prefetcher, made = DevicePrefetcher(loader, "cuda"), list[int]()
    loader.watch_memory(lambda memory: made.append(memory.ctypes.data))
    pin, buffers = prefetcher._pool._pin, list[int]()

    def count(num_bytes: int) -> torch.Tensor:
        buffers.append(num_bytes)
        buffer: torch.Tensor = pin(num_bytes)
        return buffer

    prefetcher._pool._pin = count
    for _ in range(5):
        for _ in prefetcher:
            pass
    assert len(made) == len(set(made))
    assert all(num_bytes < 2 * 3 * 64 * 64 for num_bytes in buffers), "labels at the most"
    for images, _ in loader:
        assert images.is_pinned()


def test_batches_of_hosts_cross_whole_while_their_slots_are_filled_again(packed: Path) -> None:
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


def test_pin_memory_without_the_prefetcher_is_never_torn(packed: Path) -> None:
    """A ring of slots sets this trap: a copy that waits in a stream, and a batch that is dropped at once."""
    loader, plain = _loader(packed, num_workers=2, pin_memory=True, persistent_workers=True), _loader(packed)
    stream = torch.cuda.Stream()
    for epoch in range(20):
        loader.set_epoch(epoch)
        plain.set_epoch(epoch)
        sums = []
        for images, _ in loader:
            assert images.is_pinned()
            with torch.cuda.stream(stream):
                _work_slowly()
                sums.append(images.to("cuda", non_blocking=True).long().square().sum())
            del images
        stream.synchronize()
        assert [int(figure) for figure in sums] == [int(images.long().square().sum()) for images, _ in plain]


def test_reserved_memory_does_not_grow_however_far_the_program_gets_ahead() -> None:
    prefetcher, reserved = DevicePrefetcher(_Batches(30), "cuda", normalize=NORMALIZE), []
    for _ in range(100):
        for images, _ in prefetcher:
            _work_slowly()
            del images
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[5:] == reserved[5:6] * 95
