"""Batches that are copied on a stream arrive whole and in order, however late the stream is, and are released in time.

The stream is simulated, and may delay its work for as long as CUDA is allowed to. The loader's memory is overwritten as
soon as it is freed, and buffers are pinned while the prefetcher uses them. ``test_cuda.py`` tests the same laws on a
GPU.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.utils.data
from numpy.typing import NDArray

from shardio import DataLoader, DevicePrefetcher, ShardDataset
from shardio.device import prefetcher, streams
from shardio.device.streams import SentBatch, _find_dense_parts
from shardio.transforms import CenterCrop
from tests.device.late_stream import LateStream, count_pinned_buffers, prefetch_late, prefetch_on

NUM_BATCHES = 100
Batch = tuple[torch.Tensor, torch.Tensor]


class SpoilingLoader:
    """A loader that counts the batches in use, and overwrites the memory of each batch when the batch is released."""

    def __init__(self, num_batches: int = NUM_BATCHES) -> None:
        self.num_batches = num_batches
        self.num_alive = 0
        self.memory = list[NDArray[np.uint8]]()  # References that keep overwritten memory readable.

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


@pytest.fixture(params=[True, False], ids=["pinned", "not pinned"])
def is_pinned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make the loader's tensors report that their memory is pinned, or that it is not."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: request.param)
    return bool(request.param)


def assert_whole(loader: SpoilingLoader, number: int, batch: Batch) -> None:
    assert torch.equal(batch[0], torch.from_numpy(loader.make(number)))
    assert batch[1].item() == number


@pytest.mark.usefixtures("is_pinned")
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("laziness", [0, 0.9, 1])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_batches_are_whole_and_in_order_whenever_they_are_copied(depth: int, laziness: float, is_kept: bool) -> None:
    loader = SpoilingLoader()
    prefetcher, _ = prefetch_late(loader, depth=depth, laziness=laziness)
    count = 0
    for number, batch in enumerate(list(prefetcher) if is_kept else prefetcher):
        assert laziness or is_kept or loader.num_alive <= depth + 1, (
            "besides the batches in flight, only one may be alive"
        )
        assert_whole(loader, number, batch)
        batch[0].zero_()  # The consumer may write to its batch.
        count += 1
    assert count == NUM_BATCHES
    gc.collect()
    assert loader.num_alive == 0


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_depth_limits_the_batches_in_flight_and_the_work_ahead_of_the_device(depth: int) -> None:
    """The device holds only what is in flight and what the user has."""
    prefetcher, stream = prefetch_late(SpoilingLoader(30), depth=depth, laziness=1)
    for number, _ in enumerate(prefetcher):
        assert stream.num_waits == max(number - depth, 0)
    assert stream.most_pending == depth
    alive = set[int]()

    def note(batch: Any) -> Any:
        alive.add(int(batch[1]))
        weakref.finalize(batch[1], alive.remove, int(batch[1]))
        return batch

    batches = iter(prefetch_late(SpoilingLoader(20), depth=depth, laziness=0, transform=note)[0])
    for number in range(20):
        next(batches)
        assert alive == set(range(number + 1, min(number + depth, 20)))


def test_buffers_are_reused(is_pinned: bool) -> None:
    prefetcher, _ = prefetch_late(SpoilingLoader(), depth=2, laziness=0.5)
    sizes = count_pinned_buffers(prefetcher)
    for _ in range(3):
        assert sum(1 for _ in prefetcher) == NUM_BATCHES
    assert len(sizes) == 0 if is_pinned else 2 <= len(sizes) <= 2 * (2 + 1)


@pytest.mark.usefixtures("is_pinned")
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
        prefetcher.__exit__(None, None, None)
    gc.collect()
    assert loader.num_alive == 0
    assert not stream._steps or stream.num_steps % 2 == 1, "no copy still reads the loader's memory"
    for number, batch in enumerate(kept):
        assert_whole(loader, number, batch)
    assert [batch[1].item() for batch in prefetcher] == list(range(20))


def test_setting_the_epoch_during_an_epoch_does_not_change_it(packed: Path) -> None:
    loader, plain = (DataLoader(ShardDataset(packed, fields="key"), batch_size=4) for _ in range(2))
    prefetcher, _ = prefetch_late(loader, depth=2)
    batches, expected = iter(prefetcher), iter(plain)
    for number in range(3):
        if number == 2:
            prefetcher.set_epoch(5)
            assert prefetcher.state_dict() == plain.state_dict()
        assert next(batches) == next(expected)
    assert prefetcher.state_dict() == plain.state_dict()


@pytest.mark.usefixtures("is_pinned")
@pytest.mark.parametrize("laziness", [0.3, pytest.param(1, marks=pytest.mark.slow)])
def test_buffers_are_not_reused_before_they_are_copied(packed: Path, laziness: float) -> None:
    """Real worker processes fill a buffer as soon as it is free."""
    loader, plain = make_loader(packed), make_loader(packed, num_workers=0, persistent_workers=False)
    prefetcher, _ = prefetch_late(loader, depth=3, laziness=laziness)
    for epoch in range(3):
        prefetcher.set_epoch(epoch)
        plain.set_epoch(epoch)
        for batch, expected in zip(prefetcher, plain, strict=True):
            assert all(map(torch.equal, batch, expected))


# Buffers.


class Packed:
    """An object with its own ``pin_memory`` and ``to``, like torch's PackedSequence."""

    def __init__(self, where: str = "here") -> None:
        self.where = where

    def pin_memory(self) -> Packed:
        return Packed(f"{self.where}, pinned")

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Packed:
        return Packed(f"{self.where}, moved")


@pytest.mark.parametrize(("is_available", "where"), [(True, "here, pinned, moved"), (False, "here, moved")])
def test_objects_that_can_pin_themselves_do(monkeypatch: pytest.MonkeyPatch, is_available: bool, where: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    (batch,) = prefetch_late([{"text": Packed()}])[0]
    assert batch["text"].where == where


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize(("layout", "num_parts"), [("coo", 2), ("csr", 3), ("csc", 3), ("bsr", 3), ("bsc", 3)])
def test_the_stream_is_noted_on_the_dense_parts_of_sparse_tensors(layout: str, num_parts: int) -> None:
    block: dict[str, Any] = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    parts = _find_dense_parts(torch.eye(4).to_sparse(layout=getattr(torch, f"sparse_{layout}"), **block))
    assert [part.layout for part in parts] == [torch.strided] * num_parts
    assert float(parts[-1].double().sum()) == 4, "the values are last"
    assert _find_dense_parts(dense := torch.eye(4)) == [dense]


class Registered:
    """Memory that was pinned in place; it is kept alive so that its addresses are not reused."""

    def __init__(self) -> None:
        self.blocks = list[NDArray[np.uint8]]()

    def __call__(self, memory: NDArray[np.uint8]) -> None:
        self.blocks.append(memory)

    def includes(self, tensor: torch.Tensor) -> bool:
        return any(0 <= tensor.data_ptr() - block.ctypes.data < block.nbytes for block in self.blocks)


def make_loader(packed: Path, **options: Any) -> DataLoader:
    dataset = ShardDataset(packed, transform=CenterCrop(48), shuffle=True)
    return DataLoader(dataset, **{"batch_size": 2, "num_workers": 2, "persistent_workers": True, **options})


@pytest.mark.parametrize("persistent_workers", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_other_epochs_have_other_memory(packed: Path, persistent_workers: bool) -> None:
    """An epoch outside ``watch_memory`` must not get pinned buffers.

    A user's ``x.cuda(non_blocking=True)`` may still be copying a pinned buffer when the loader refills it.
    """
    loader, registered = make_loader(packed, persistent_workers=persistent_workers), Registered()
    for _ in range(2):
        with loader.watch_memory(registered):
            batches = iter(loader)
        assert all(registered.includes(images) for images, _ in batches)
        assert not any(registered.includes(images) for images, _ in loader)
    assert len({block.ctypes.data for block in registered.blocks}) == len(registered.blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "is_kept"), [(1, True), (4, True), (2, False)])
def test_buffers_are_pinned_once_and_kept_for_all_epochs_and_prefetchers(
    packed: Path, monkeypatch: pytest.MonkeyPatch, depth: int, is_kept: bool
) -> None:
    """Users may write ``for epoch in …: for batch in DevicePrefetcher(loader): …``."""
    loader, registered = make_loader(packed, batch_size=1), Registered()
    monkeypatch.setattr(streams.Registration, "__call__", lambda _, memory: registered(memory))

    def make() -> DevicePrefetcher:
        stream = LateStream(0, laziness=0.9)
        return prefetch_on(stream, loader, streams.Registration(torch.device("cuda", 0)), depth=depth)

    prefetcher, numbers = make(), list[int]()
    for _ in range(6):
        assert sum(1 for _ in (prefetcher if is_kept else make())) == len(loader)
        numbers.append(len(registered.blocks))
    assert not any(registered.includes(images) for images, _ in loader), "a plain iteration pins nothing"
    assert 0 < numbers[0] <= 2 + 2 + depth + 1
    assert numbers[2:] == numbers[2:3] * 4


@pytest.mark.parametrize("status", [0, 1])
def test_a_refused_registration_leaves_no_error(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """The first kernel after CUDA's error reports the error and clears it."""
    launch = mock.Mock(side_effect=RuntimeError("CUDA error: invalid argument"))
    cudart = mock.Mock(cudaHostRegister=lambda address, num_bytes, flags: status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", launch)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: False)
    streams.Registration(torch.device("cuda", 1))(np.zeros(4096, np.uint8))
    assert [call.kwargs["device"] for call in launch.call_args_list] == [torch.device("cuda", 1)] * status


# The time that the device spends waiting for data, on simulated streams with a clock.


@dataclass
class Event:
    """A point in time, which is computed when the work before it is queued."""

    device: Device
    time_s: float

    def query(self) -> bool:
        return self.device.now_s >= self.time_s

    def synchronize(self) -> None:
        self.device.now_s = max(self.device.now_s, self.time_s)

    def elapsed_time(self, end_event: Event, /) -> float:
        return 1000 * (end_event.time_s - self.time_s)


class Device:
    """A device with a stream for copies and one for the consumer's work.

    Attributes:
        now_s: The program's clock.
        idle_s: The time that the device has spent without work since the second batch.
    """

    def __init__(self, copy_s: float) -> None:
        self.copy_s = copy_s
        self.now_s = self.idle_s = 0.0
        self._copied_s = self._computed_s = self._may_begin_s = 0.0

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> SentBatch:
        self._copied_s = max(self._copied_s, self._computed_s, self.now_s) + self.copy_s
        event = Event(self, self._copied_s)
        return SentBatch(copied=event, ready=event, batch=prepare(copy()))

    def receive(self, sent: SentBatch) -> Any:
        ready: Any = sent.ready
        self._may_begin_s = max(self.now_s, ready.time_s)
        return sent.batch

    def record_event(self) -> Any:
        return Event(self, max(self.now_s, self._computed_s, self._may_begin_s))

    def compute(self, step_s: float) -> None:
        began_s = max(self._computed_s, self._may_begin_s)
        self.idle_s += began_s - self._computed_s
        self._computed_s = began_s + step_s


class Loader:
    def __init__(self, device: Device, costs_s: list[float]) -> None:
        self.device, self.costs_s = device, costs_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        for cost_s in self.costs_s:
            self.device.now_s += cost_s
            yield torch.zeros(1)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device(copy_s=0.01)
    monkeypatch.setattr(prefetcher.time, "perf_counter", lambda: made.now_s)  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("load_s", [0.0, 0.05, 0.15])
def test_the_stall_is_the_time_that_the_device_is_idle_and_never_decreases(
    device: Device, depth: int, load_s: float
) -> None:
    """A step takes 100 ms. Waiting for the device itself, as a program that only queues work does, is not a stall."""
    draw = random.Random(0)
    costs_s = [load_s * 2 * draw.random() for _ in range(200)]
    prefetcher = prefetch_on(device, Loader(device, costs_s), depth=depth)
    stalls_s = [prefetcher.stats().data_stall_s]
    for _ in prefetcher:
        stalls_s.append(prefetcher.stats().data_stall_s)
        device.compute(0.1)
    device.now_s += 10
    stats = prefetcher.stats()
    assert stats.num_batches == 200
    assert stats.loader_wait_s == pytest.approx(sum(costs_s))
    assert stats.data_stall_s == pytest.approx(device.idle_s)
    assert (stats.data_stall_s > 5) == (load_s > 0.1)
    assert stalls_s == sorted(stalls_s)


def test_without_streams_the_program_is_the_device(device: Device) -> None:
    prefetcher = DevicePrefetcher(Loader(device, [0.5] * 4), "cpu")
    for _ in prefetcher:
        device.now_s += 3
    stats = prefetcher.stats()
    assert (stats.num_batches, stats.loader_wait_s, stats.data_stall_s) == (4, 2.0, 2.0)


class Jittering:
    """A loader that makes batches in the background; each batch takes a different amount of time."""

    def __init__(self, device: Device, costs_s: list[float], *, tells: bool) -> None:
        self.device, self.costs_s = device, costs_s
        if tells:
            self.is_ready = self.wait
        self.made_s = 0.0

    def wait(self, timeout_s: float) -> bool:
        self.device.now_s = max(min(self.device.now_s + timeout_s, self.made_s), self.device.now_s)
        return self.device.now_s >= self.made_s

    def __iter__(self) -> Jittering:
        self.left, self.made_s = list(self.costs_s), self.device.now_s + self.costs_s[0]
        return self

    def __next__(self) -> torch.Tensor:
        if not self.left:
            raise StopIteration
        self.left.pop(0)
        self.device.now_s = max(self.device.now_s, self.made_s)
        if self.left:
            self.made_s = self.device.now_s + self.left[0]
        return torch.zeros(1)


def test_a_batch_that_is_there_is_handed_out_before_the_next_one_is_waited_for(device: Device) -> None:
    draw = random.Random(1)
    costs_s = [0.3 if draw.random() < 0.1 else 0.05 for _ in range(300)]
    idle_s = list[float]()
    for tells in (False, True):
        simulated = Device(copy_s=0.01)
        device.__dict__.update(simulated.__dict__)  # Update the fixture in place, because the patched clock reads it.
        for _ in prefetch_on(device, Jittering(device, costs_s, tells=tells), depth=2):
            device.compute(0.1)
        idle_s.append(device.idle_s)
    assert idle_s[1] < 0.9 * idle_s[0]
    prefetcher = prefetch_on(device, Jittering(device, [0.2] * 50, tells=True), depth=2)
    for _ in prefetcher:
        device.compute(0.05)
    assert prefetcher.stats().loader_wait_s == pytest.approx(50 * 0.2, rel=0.05), "the wait is counted"


def test_an_error_of_the_question_is_raised_after_the_batches_in_flight(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Jittering(device, [0.0] * 5, tells=True)
    wait = loader.wait

    def fail(timeout_s: float) -> bool:
        if len(loader.left) == 2:  # The fourth batch cannot be made.
            raise LookupError("planted")
        return wait(timeout_s)

    monkeypatch.setattr(loader, "is_ready", fail)
    batches = iter(prefetch_on(device, loader, depth=3))
    for _ in range(3):
        assert next(batches).tolist() == [0]
        device.compute(0.1)
    with pytest.raises(LookupError, match="planted"):
        next(batches)
