"""Batches in flight: those being copied to the device, and the memory that they are copied from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardio.device.batches import map_tensors
from shardio.device.pinned import PinnedPool
from shardio.device.streams import BatchCopy, CopyStream, StreamEvent


class _Sent(NamedTuple):
    copy: BatchCopy
    note: Any


class _Source(NamedTuple):
    """The source of a copy: memory that the loader may reuse after its release, and buffers."""

    copy: BatchCopy
    batch: Any
    buffers: list[torch.Tensor]


class InFlightBatches:
    """The batches of one epoch that are in flight on a stream.

    Args:
        stream: The stream for copies.
        pool: The buffers for tensors that are not in pinned memory.
        copy: A function that copies a batch to the device.
        prepare: A function that makes the final batch from the copied one.
    """

    def __init__(
        self, stream: CopyStream, pool: PinnedPool, copy: Callable[[Any], Any], prepare: Callable[[Any], Any]
    ) -> None:
        self._stream, self._pool = stream, pool
        self._copy, self._prepare = copy, prepare
        self._sent: deque[_Sent] = deque()
        self._sources: deque[_Source] = deque()
        self._events: deque[StreamEvent] = deque()

    def __len__(self) -> int:
        """Return the number of batches that were sent but not yet received."""
        return len(self._sent)

    def send(self, batch: Any, note: Any) -> None:
        """Send a batch. :meth:`receive` returns it together with ``note``."""
        self._release()
        buffers: list[torch.Tensor] = []

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
                return tensor
            if type(tensor) is not torch.Tensor:  # A copy of a subclass, such as a mask, would lose the subclass.
                return tensor
            pinned, buffer = self._pool.take(tensor)
            buffers.append(buffer)
            return pinned

        pinned = map_tensors(batch, pin)
        copy = self._stream.send(lambda: self._copy(pinned), self._prepare)
        self._sources.append(_Source(copy, pinned, buffers))
        self._sent.append(_Sent(copy, note))

    def receive(self) -> tuple[Any, Any]:
        """Return the next batch on the device, and its note."""
        copy, note = self._sent.popleft()
        return copy.receive(), note

    def wait_for_consumer(self, max_batches: int) -> None:
        """Wait until the device has at most ``max_batches`` batches of the consumer's work left.

        Without this limit, a fast program runs ahead of its device, and each step ahead takes more
        memory.
        """
        self._events.append(self._stream.record_event())
        if len(self._events) > max_batches:
            self._events.popleft().synchronize()

    def close(self) -> None:
        """Wait until all copies are done, and release everything."""
        for source in self._sources:
            source.copy.wait_until_copied()
        self._release()
        self._sent.clear()
        self._events.clear()

    def _release(self) -> None:
        """Release the memory of finished copies."""
        while self._sources and self._sources[0].copy.is_copied():
            for buffer in self._sources.popleft().buffers:
                self._pool.put_back(buffer)


class SynchronousBatches:
    """The same interface without a stream: each batch is copied and prepared when it is sent.

    Args:
        prepare: A function that copies a batch to the device and makes the final batch from it.
    """

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._sent: deque[tuple[Any, Any]] = deque()

    def __len__(self) -> int:
        """Return the number of batches that were sent but not yet received."""
        return len(self._sent)

    def send(self, batch: Any, note: Any) -> None:
        """Prepare a batch. :meth:`receive` returns it together with ``note``."""
        self._sent.append((self._prepare(batch), note))

    def receive(self) -> tuple[Any, Any]:
        """Return the next batch and its note."""
        return self._sent.popleft()

    def wait_for_consumer(self, max_batches: int) -> None:
        """Do nothing: the consumer never runs ahead."""

    def close(self) -> None:
        """Release everything."""
        self._sent.clear()
