"""A simulated copy stream, which works at random moments within the limits of CUDA, and loaders for tests."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from shardio.device import DevicePrefetcher
from shardio.device.streams import PinnedPool, SentBatch, StreamEvent, WaitingTimes, map_tensors
from shardio.libraries import own_tensors


@dataclass(slots=True, eq=False)
class LateBatch:
    """A batch that is copied and prepared at the latest possible moment, or at a random earlier one."""

    value: Any

    def copy(self) -> None:
        with own_tensors():  # Torch modes of the caller do not affect a device.
            self.value = map_tensors(self.value, torch.Tensor.clone)  # A device has its own memory.

    def prepare(self, prepare: Callable[[Any], Any]) -> None:
        with own_tensors():
            self.value = prepare(self.value)


class LateEvent:
    def __init__(self, stream: LateStream, step: int) -> None:
        self._stream, self._step = stream, step

    def query(self) -> bool:
        self._stream.advance_at_random()
        return self._stream.num_steps >= self._step

    def synchronize(self) -> None:
        self._stream.advance_to(self._step)

    def elapsed_time(self, end_event: Any, /) -> float:
        return 0.0


class ConsumerEvent(LateEvent):
    """A point in the consumer's work. In this simulation, that work is never late."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._stream.num_waits += 1


class LateStream:
    """A stream that executes its work in order, with random delays.

    Attributes:
        num_steps: The number of executed steps. Each batch has two steps: copy and prepare.
        num_waits: The number of waits for the consumer's work.
        most_pending: The maximum number of batches that were pending at the same time.
    """

    def __init__(self, seed: int, laziness: float = 0.8) -> None:
        self._random = random.Random(seed)
        self._laziness = laziness
        self._steps: deque[Callable[[], None]] = deque()
        self.num_steps = self.num_waits = self.most_pending = 0

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> SentBatch:
        batch = LateBatch(map_tensors(copy(), _not_held))
        self._steps += [batch.copy, partial(batch.prepare, prepare)]
        last = self.num_steps + len(self._steps)
        self.most_pending = max(self.most_pending, -(-len(self._steps) // 2))
        sent = SentBatch(copied=LateEvent(self, last - 1), ready=LateEvent(self, last), batch=batch)
        self.advance_at_random()
        return sent

    def receive(self, sent: SentBatch) -> Any:
        sent.ready.synchronize()
        return sent.batch.value

    def record_event(self) -> StreamEvent:
        return ConsumerEvent(self, 0)

    def advance_at_random(self) -> None:
        while self._steps and self._random.random() > self._laziness:
            self.advance_to(self.num_steps + 1)

    def advance_to(self, step: int) -> None:
        while self.num_steps < step:
            self._steps.popleft()()
            self.num_steps += 1


def _not_held(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares memory without keeping it alive: a copy on a device doesn't keep its source alive."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_uint8 * (span * tensor.element_size())).from_address(tensor.data_ptr())
    seen = torch.from_numpy(np.ctypeslib.as_array(memory)).view(tensor.dtype)
    return seen.as_strided(tensor.shape, tensor.stride()).as_subclass(type(tensor))


def prefetch_late(
    loader: Iterable[Any], *, seed: int = 0, laziness: float = 0.8, **options: Any
) -> tuple[DevicePrefetcher, LateStream]:
    """Return a prefetcher that works as it does on CUDA, but with a late stream and ordinary memory (not pinned)."""
    stream = LateStream(seed, laziness)
    return prefetch_on(stream, loader, **options), stream


def prefetch_on(stream: Any, loader: Iterable[Any], register: Any = None, **options: Any) -> DevicePrefetcher:
    """Return a prefetcher that uses a given stream as it would a CUDA stream. ``register`` pins memory in place."""
    prefetcher = DevicePrefetcher(loader, "cpu", **options)
    prefetcher._stream, prefetcher._times = stream, WaitingTimes(has_stream=True)
    prefetcher._register = register or (lambda memory: None)  # type: ignore[assignment]  # CUDA's is a Registration
    prefetcher._pool = PinnedPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
    return prefetcher


class CountingLoader:
    """A loader that counts the batches that it yields, and raises ``error``, if given, after the last one."""

    def __init__(self, batches: Sequence[Any], error: Exception | None = None) -> None:
        self.batches, self.error = batches, error
        self.epoch, self.num_given = -1, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.num_given = self.num_given % len(self.batches), 0
        for number in range(start, len(self.batches)):
            self.num_given = number + 1
            yield self.batches[number]
        if self.error is not None:
            raise self.error

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.num_given = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "num_given": self.num_given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.num_given = state["epoch"], state["num_given"]


def count_pinned_buffers(prefetcher: DevicePrefetcher) -> list[int]:
    """Return a list that receives the size, in bytes, of each buffer that the prefetcher pins from now on."""
    sizes, pin = list[int](), prefetcher._pool._pin

    def count(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        buffer: torch.Tensor = pin(num_bytes)
        return buffer

    prefetcher._pool._pin = count
    return sizes
