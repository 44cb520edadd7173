"""A side stream without a device: it does what it is given as late as CUDA may, and as early as it may, by chance."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from shardio.device import DevicePrefetcher
from shardio.device.batches import map_tensors
from shardio.device.pinned import PinnedPool
from shardio.device.streams import Crossing, Mark
from shardio.torch_modes import own_tensors


class LateCrossing:
    """A batch of which nothing happens before it must, or chance wills it."""

    def __init__(self, stream: LateStream, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> None:
        self._stream, self._prepare = stream, prepare
        self._there = map_tensors(copy(), _not_held)
        self._made: Any = None
        self.num_steps = 0

    def step(self) -> None:
        """Do the next one of two things: copy, prepare."""
        with own_tensors():  # A device does it in the modes in which it was sent.
            if self.num_steps == 0:
                self._there = map_tensors(self._there, torch.Tensor.clone)  # A device has memory of its own.
            else:
                self._made, self._there = self._prepare(self._there), None
        self.num_steps += 1

    def is_copied(self) -> bool:
        self._stream.go_on_by_chance()
        return self.num_steps > 0

    def wait_until_copied(self) -> None:
        self._stream.go_on_until(self, 1)

    def receive(self) -> Any:
        self._stream.go_on_until(self, 2)
        made, self._made = self._made, None
        return made


class LateMark:
    """A moment of the consumer's, whose work is done at once here."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def wait(self) -> None:
        self._stream.num_waits += 1


class LateStream:
    """Does what it is given in its order, at some time."""

    def __init__(self, seed: int, laziness: float = 0.8) -> None:
        self._random = random.Random(seed)
        self._laziness = laziness
        self._pending: deque[LateCrossing] = deque()
        self.num_waits = self.most_pending = 0

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> Crossing:
        crossing = LateCrossing(self, copy, prepare)
        self._pending.append(crossing)
        self.most_pending = max(self.most_pending, len(self._pending))
        self.go_on_by_chance()
        return crossing

    def mark(self) -> Mark:
        return LateMark(self)

    def go_on_by_chance(self) -> None:
        while self._pending and self._random.random() > self._laziness:
            self._step()

    def go_on_until(self, crossing: LateCrossing, num_steps: int) -> None:
        while crossing.num_steps < num_steps:
            self._step()

    def _step(self) -> None:
        first = self._pending[0]
        first.step()
        if first.num_steps == 2:
            self._pending.popleft()


def _not_held(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that does not keep it, as a device does not that is still to copy it."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_uint8 * (span * tensor.element_size())).from_address(tensor.data_ptr())
    seen = torch.from_numpy(np.ctypeslib.as_array(memory)).view(tensor.dtype)
    return seen.as_strided(tensor.shape, tensor.stride()).as_subclass(type(tensor))


def prefetch_late(
    loader: Iterable[Any], *, seed: int = 0, laziness: float = 0.8, **options: Any
) -> tuple[DevicePrefetcher, LateStream]:
    """Return a prefetcher that works as on CUDA, over a stream that is late, with pinned memory that is none."""
    prefetcher, stream = DevicePrefetcher(loader, "cpu", **options), LateStream(seed, laziness)
    prefetcher._side = stream
    prefetcher._pool = PinnedPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
    return prefetcher, stream
