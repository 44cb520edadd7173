"""The time that the device waits for data, on simulated streams with a clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.data

from shardio import DevicePrefetcher
from shardio.device import prefetcher
from shardio.device.streams import SentBatch
from tests.device.late_stream import prefetch_on


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
    """A loader that makes batches in the background; each batch takes a different time."""

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


def test_the_wait_for_a_loader_that_is_not_ready_is_counted(device: Device) -> None:
    prefetcher = prefetch_on(device, Jittering(device, [0.2] * 50, tells=True), depth=2)
    for _ in prefetcher:
        device.compute(0.05)
    assert prefetcher.stats().loader_wait_s == pytest.approx(50 * 0.2, rel=0.05)


class Failing(Jittering):
    """A loader whose fourth batch cannot be made: waiting for it raises the error."""

    def wait(self, timeout_s: float) -> bool:
        if len(self.left) == 2:
            raise LookupError("planted")
        return super().wait(timeout_s)


def test_an_error_of_the_question_is_raised_after_the_batches_in_flight(device: Device) -> None:
    batches = iter(prefetch_on(device, Failing(device, [0.0] * 5, tells=True), depth=3))
    for _ in range(3):
        assert next(batches).tolist() == [0]
        device.compute(0.1)
    with pytest.raises(LookupError, match="planted"):
        next(batches)
