"""Batches that are copied on a stream arrive whole and in order, however late the stream is, and are released in time.

The stream has no device and works as late as CUDA may. The loader's memory is overwritten as soon as it is freed.
``test_cuda.py`` tests the same laws on a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from numpy.typing import NDArray

from shardio import DataLoader, DevicePrefetcher, ShardDataset
from shardio.transforms import CenterCrop
from tests.device.late_stream import prefetch_late
from tests.device.loaders import CountingLoader, count_pinned_buffers

NUM_BATCHES = 100
Batch = tuple[torch.Tensor, torch.Tensor]


class SpoilingLoader:
    """Yields batches over memory that is overwritten as soon as they are released.

    Attributes:
        num_alive: How many batches have not been released.
    """

    def __init__(self, num_batches: int = NUM_BATCHES) -> None:
        self.num_batches = num_batches
        self.num_alive = 0
        self.memory = list[NDArray[np.uint8]]()  # Kept, so that overwritten memory can still be read.

    def make(self, number: int) -> NDArray[np.uint8]:
        return np.random.default_rng(number).integers(0, 256, (2, 3, 5, 4), np.uint8)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.num_batches):
            memory = self.make(number)
            self.memory.append(memory)
            view = memory[:]
            weakref.finalize(view, self._spoil, memory)
            self.num_alive += 1
            yield torch.from_numpy(view), torch.tensor([number])
            del view

    def _spoil(self, memory: NDArray[np.uint8]) -> None:
        memory[...] ^= 0xFF
        self.num_alive -= 1


@pytest.fixture(params=[True, False], ids=["pinned", "not pinned"], autouse=True)
def is_pinned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the loader's tensors are in pinned memory, so that the device copies from them directly."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: request.param)
    is_: bool = request.param
    return is_


def assert_whole(loader: SpoilingLoader, number: int, batch: Batch) -> None:
    assert torch.equal(batch[0], torch.from_numpy(loader.make(number)))
    assert batch[1].item() == number


@pytest.mark.parametrize("laziness", [0, 0.5, 0.9, 1])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_are_whole_and_in_order_whenever_they_are_copied(depth: int, laziness: float) -> None:
    loader = SpoilingLoader()
    prefetcher, _ = prefetch_late(loader, depth=depth, laziness=laziness)
    count = 0
    for number, batch in enumerate(prefetcher):
        assert_whole(loader, number, batch)
        batch[0].zero_()  # The consumer may write to its batch.
        count += 1
    assert count == NUM_BATCHES
    gc.collect()
    assert loader.num_alive == 0


def test_batches_that_are_kept_stay_as_they_were() -> None:
    loader = SpoilingLoader(200)
    prefetcher, _ = prefetch_late(loader, depth=3)
    for number, batch in enumerate(list(prefetcher)):
        assert_whole(loader, number, batch)


def test_the_loaders_memory_is_released_after_its_copy() -> None:
    loader = SpoilingLoader(50)
    prefetcher, _ = prefetch_late(loader, depth=3, laziness=0)
    for _ in prefetcher:
        assert loader.num_alive <= 3 + 1, "three are in flight, and one more may be copied"


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depth_limits_the_batches_in_flight_and_the_work_ahead_of_the_device(depth: int) -> None:
    prefetcher, stream = prefetch_late(SpoilingLoader(30), depth=depth, laziness=1)
    for number, _ in enumerate(prefetcher):
        assert stream.num_waits == max(number - depth, 0)
    assert stream.most_pending == depth


def test_buffers_are_reused(is_pinned: bool) -> None:
    prefetcher, _ = prefetch_late(SpoilingLoader(), depth=2, laziness=0.5)
    sizes = count_pinned_buffers(prefetcher)
    for _ in range(3):
        for _ in prefetcher:
            pass
    assert len(sizes) == 0 if is_pinned else 2 <= len(sizes) <= 2 * (2 + 1)


@pytest.mark.parametrize("end", ["break", "close", "with"])
def test_leaving_early_releases_everything_after_its_copy(end: str) -> None:
    loader = SpoilingLoader(20)
    prefetcher, stream = prefetch_late(loader, depth=4, laziness=1)
    batches = iter(prefetcher)
    kept = [next(batches) for _ in range(3)]
    if end == "break":
        del batches
    elif end == "close":
        prefetcher.close()
    else:
        with prefetcher:
            pass
    gc.collect()
    assert loader.num_alive == 0
    assert not stream._pending or stream._pending[0].num_steps == 1, "no copy still reads the loader's memory"
    for number, batch in enumerate(kept):
        assert_whole(loader, number, batch)
    assert [batch[1].item() for batch in prefetcher] == list(range(20))


def test_an_error_of_the_loader_is_raised_after_the_batches_before_it() -> None:
    loader = CountingLoader([torch.tensor(number) for number in range(5)], error=KeyError("lost"))
    received = []
    prefetcher, _ = prefetch_late(loader, depth=3)
    with pytest.raises(KeyError, match="lost"):  # noqa: PT012  # what was received before counts, too
        for batch in prefetcher:
            received.append(int(batch))  # noqa: PERF401  # as above
    assert received == list(range(5))


@pytest.mark.parametrize("depth", [1, 3])
def test_the_state_is_that_of_the_last_batch_received(depth: int) -> None:
    prefetcher, _ = prefetch_late(CountingLoader([torch.tensor(i) for i in range(9)]), depth=depth)
    for number, batch in enumerate(prefetcher):
        assert int(batch) == number
        assert prefetcher.state_dict()["num_given"] == number + 1
    prefetcher.set_epoch(7)
    assert prefetcher.state_dict() == {"epoch": 7, "num_given": 0}


class Counting(torch.utils.data.IterableDataset[int]):
    """Counts to 13, and says where it is."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        while self.number < 13:
            self.number += 1
            yield self.number
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_iterable", [False, True])
def test_the_state_of_any_loader_counts_the_batches_that_the_user_received(is_iterable: bool, num_workers: int) -> None:
    def make() -> DevicePrefetcher:
        dataset = Counting() if is_iterable else range(13)
        torch.manual_seed(3)
        loader = DataLoader(dataset, 2, shuffle=None if is_iterable else True, num_workers=num_workers)
        return prefetch_late(loader, depth=3)[0]

    whole = [batch.tolist() for batch in make()]
    prefetcher = make()
    states = [prefetcher.state_dict()]
    for _ in prefetcher:
        states.append(prefetcher.state_dict())  # noqa: PERF401  # The state is that of the batch in the loop.
    for num_received in (0, 1, len(whole) - 1):
        state, resumed = states[num_received], make()
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == whole[num_received:]


def test_other_loaders_need_no_state() -> None:
    with pytest.warns(RuntimeWarning, match="list has no state"):
        assert DevicePrefetcher([], "cpu").state_dict() == {}
    with pytest.warns(RuntimeWarning, match="list has no state"):
        DevicePrefetcher([], "cpu").load_state_dict({})
    with pytest.raises(TypeError, match=r"list has no load_state_dict: wrap a shardio\.DataLoader"):
        DevicePrefetcher([], "cpu").load_state_dict({"epoch": 1})


def test_setting_the_epoch_during_an_epoch_does_not_change_it(packed: Path) -> None:
    loader = DataLoader(ShardDataset(packed, fields="key"), batch_size=4)
    prefetcher, _ = prefetch_late(loader, depth=2)
    plain = DataLoader(ShardDataset(packed, fields="key"), batch_size=4)
    batches, expected = iter(prefetcher), iter(plain)
    for _ in range(2):
        assert next(batches) == next(expected)
    prefetcher.set_epoch(5)
    assert prefetcher.state_dict() == plain.state_dict()
    assert next(batches) == next(expected)
    assert prefetcher.state_dict() == plain.state_dict()


@pytest.mark.parametrize("laziness", [0.3, 1])
def test_slots_are_not_reused_before_they_are_copied(packed: Path, laziness: float) -> None:
    """Real worker processes fill a slot as soon as it is free."""
    dataset = ShardDataset(packed, fields=("image", "key"), transform=CenterCrop(48), shuffle=True)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True)
    plain = DataLoader(
        ShardDataset(packed, fields=("image", "key"), transform=CenterCrop(48), shuffle=True), batch_size=2
    )
    prefetcher, _ = prefetch_late(loader, depth=3, laziness=laziness)
    for epoch in range(8):
        prefetcher.set_epoch(epoch)
        plain.set_epoch(epoch)
        count = 0
        for (images, keys), (expected, expected_keys) in zip(prefetcher, plain, strict=True):
            assert torch.equal(images, expected)
            assert keys == expected_keys
            count += 1
        assert count == len(loader)


def test_a_transform_takes_the_prepared_batch_and_returns_the_final_one() -> None:
    images = torch.arange(24, dtype=torch.uint8).reshape(1, 2, 3, 4)

    def swap(batch: Any) -> Any:
        image, label = batch
        assert image.dtype == torch.float16
        return label, image.flip(-1)

    for prefetcher in (
        prefetch_late([(images, torch.tensor([3]))], dtype=torch.float16, transform=swap)[0],
        DevicePrefetcher([(images, torch.tensor([3]))], "cpu", dtype=torch.float16, transform=swap),
    ):
        ((label, image),) = prefetcher
        assert label.tolist() == [3]
        assert torch.equal(image, images.flip(-1).to(torch.float16))


def test_memory_watchers_get_each_block_of_memory(packed: Path) -> None:
    sizes = list[int]()
    loader = DataLoader(ShardDataset(packed, transform=CenterCrop(48)), batch_size=2, num_workers=2)
    loader.watch_memory(lambda memory: sizes.append(memory.nbytes))
    images, _ = next(iter(loader))
    assert sizes
    assert all(num_bytes >= images.nbytes for num_bytes in sizes)


def test_later_watchers_get_existing_memory_once(packed: Path) -> None:
    """Persistent workers keep their slots: a later prefetcher must pin them, too."""
    first, second = list[NDArray[np.uint8]](), list[NDArray[np.uint8]]()  # Kept, so that addresses are not reused.
    dataset = ShardDataset(packed, transform=CenterCrop(48))
    loader = DataLoader(dataset, batch_size=2, num_workers=1, persistent_workers=True)
    loader.watch_memory(first.append)
    for _ in loader:
        pass
    loader.watch_memory(second.append)
    used = {batch[0].data_ptr() for _ in range(2) for batch in loader}
    starts, later_starts = ([memory.ctypes.data for memory in watched] for watched in (first, second))
    assert len(starts) == len(set(starts))
    assert len(later_starts) == len(set(later_starts))
    assert set(later_starts) <= set(starts)
    assert all(any(0 <= address - memory.ctypes.data < memory.nbytes for memory in second) for address in used)
