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
from shardio.device.streams import _find_dense_parts
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


@pytest.mark.parametrize("laziness", [0, 0.9, 1])
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


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_device_holds_only_what_is_in_flight_and_what_the_user_has(depth: int) -> None:
    """A float32 batch of 256 images takes 154 MB."""
    alive = set[int]()

    def note(batch: Any) -> Any:
        alive.add(int(batch[1]))
        weakref.finalize(batch[1], alive.remove, int(batch[1]))
        return batch

    prefetcher, _ = prefetch_late(SpoilingLoader(20), depth=depth, laziness=0, transform=note)
    batches = iter(prefetcher)
    for number in range(20):
        next(batches)
        assert alive == set(range(number + 1, min(number + depth, 20)))


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
    assert not stream._steps or stream.num_steps % 2 == 1, "no copy still reads the loader's memory"
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
def test_buffers_are_not_reused_before_they_are_copied(packed: Path, laziness: float) -> None:
    """Real worker processes fill a buffer as soon as it is free."""
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


class Packed:
    """An object that pins and moves itself, as torch's PackedSequence does."""

    def __init__(self, where: str = "here") -> None:
        self.where = where

    def pin_memory(self) -> Packed:
        return Packed(f"{self.where}, pinned")

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Packed:
        return Packed(f"{self.where}, moved")


@pytest.mark.parametrize("is_available", [True, False])
def test_objects_that_can_pin_themselves_do(monkeypatch: pytest.MonkeyPatch, is_available: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    prefetcher, _ = prefetch_late([{"text": Packed()}])
    ((batch),) = prefetcher
    assert batch["text"].where == ("here, pinned, moved" if is_available else "here, moved")


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc", "strided"])
def test_the_stream_is_noted_on_the_memory_of_sparse_tensors(layout: str) -> None:
    """Only dense tensors know streams."""
    dense = torch.eye(4)
    if layout == "strided":
        assert _find_dense_parts(dense) == [dense]
        return
    block: dict[str, Any] = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    sparse = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), **block)
    parts = _find_dense_parts(sparse)
    assert all(part.layout == torch.strided for part in parts)
    assert len(parts) == (2 if layout == "coo" else 3)
    assert sum(float(part.double().sum()) for part in parts[-1:]) == 4, "the values are last"
