"""A copy stream without a device: at random, it works as late or as early as CUDA may."""

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
from shardio.device.streams import BatchCopy, StreamEvent
from shardio.torch_modes import own_tensors


class LateCopy:
    """A batch that is copied and prepared when it must be, or earlier at random."""

    def __init__(self, stream: LateStream, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> None:
        self._stream, self._prepare = stream, prepare
        self._copied = map_tensors(copy(), _not_held)
        self._prepared: Any = None
        self.num_steps = 0

    def step(self) -> None:
        """Do the next of two steps: copy, prepare."""
        with own_tensors():  # A device works outside the modes of the caller.
            if self.num_steps == 0:
                self._copied = map_tensors(self._copied, torch.Tensor.clone)  # A device has its own memory.
            else:
                self._prepared, self._copied = self._prepare(self._copied), None
        self.num_steps += 1

    def is_copied(self) -> bool:
        self._stream.advance_at_random()
        return self.num_steps > 0

    def wait_until_copied(self) -> None:
        self._stream.advance_until(self, 1)

    def receive(self) -> Any:
        self._stream.advance_until(self, 2)
        prepared, self._prepared = self._prepared, None
        return prepared


class LateEvent:
    """A point in the consumer's work, which is done at once here."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        self._stream.num_waits += 1


class LateStream:
    """Does its work in order, at some time."""

    def __init__(self, seed: int, laziness: float = 0.8) -> None:
        self._random = random.Random(seed)
        self._laziness = laziness
        self._pending: deque[LateCopy] = deque()
        self.num_waits = self.most_pending = 0

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> BatchCopy:
        late_copy = LateCopy(self, copy, prepare)
        self._pending.append(late_copy)
        self.most_pending = max(self.most_pending, len(self._pending))
        self.advance_at_random()
        return late_copy

    def record_event(self) -> StreamEvent:
        return LateEvent(self)

    def advance_at_random(self) -> None:
        while self._pending and self._random.random() > self._laziness:
            self._step()

    def advance_until(self, late_copy: LateCopy, num_steps: int) -> None:
        while late_copy.num_steps < num_steps:
            self._step()

    def _step(self) -> None:
        first = self._pending[0]
        first.step()
        if first.num_steps == 2:
            self._pending.popleft()


def _not_held(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory without keeping it alive. A device does not keep its source alive either."""
    if tensor.layout != torch.strided or not tensor.numel():
        return tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_uint8 * (span * tensor.element_size())).from_address(tensor.data_ptr())
    seen = torch.from_numpy(np.ctypeslib.as_array(memory)).view(tensor.dtype)
    return seen.as_strided(tensor.shape, tensor.stride()).as_subclass(type(tensor))


def prefetch_late(
    loader: Iterable[Any], *, seed: int = 0, laziness: float = 0.8, **options: Any
) -> tuple[DevicePrefetcher, LateStream]:
    """Return a prefetcher that works as on CUDA, with a late stream and ordinary memory in place of pinned memory."""
    prefetcher, stream = DevicePrefetcher(loader, "cpu", **options), LateStream(seed, laziness)
    prefetcher._stream = stream
    prefetcher._pool = PinnedPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8, device="cpu"))
    return prefetcher, stream
