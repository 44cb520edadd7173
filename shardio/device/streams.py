"""The stream that copies batches to the device while the consumer computes on another stream.

This is the only module that uses CUDA streams, so tests can run the prefetcher on a simulated
stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from shardio.device.batches import map_tensors


class BatchCopy(Protocol):
    """The copy of one batch to the device."""

    def is_copied(self) -> bool:
        """Return whether the device has finished reading the source memory."""

    def wait_until_copied(self) -> None:
        """Wait until the device has finished reading the source memory."""

    def receive(self) -> Any:
        """Return the batch on the device. Later work on the caller's stream waits for the batch."""


class StreamEvent(Protocol):
    """A point in the work that is queued on a stream."""

    def synchronize(self) -> None:
        """Wait until the stream reaches this point."""


class CopyStream(Protocol):
    """A stream for copies."""

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> BatchCopy:
        """Queue a copy to the device and the preparation of the copied batch.

        Both run after all earlier sends, and after the work that is already queued on the caller's
        stream. So memory that the caller has freed is not overwritten while the device still reads
        it.
        """

    def record_event(self) -> StreamEvent:
        """Return an event after the work that is queued on the caller's stream."""


class CudaStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> BatchCopy:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copied_batch = copy()
            copied = self._stream.record_event()
            batch = prepare(copied_batch)
            ready = self._stream.record_event()
        return CudaBatchCopy(self._device, batch, copied, ready)

    def record_event(self) -> StreamEvent:
        event: StreamEvent = torch.cuda.current_stream(self._device).record_event()
        return event


class CudaBatchCopy:
    """The copy of one batch on a CUDA stream."""

    def __init__(self, device: torch.device, batch: Any, copied: torch.cuda.Event, ready: torch.cuda.Event) -> None:
        self._device, self._batch, self._copied, self._ready = device, batch, copied, ready

    def is_copied(self) -> bool:
        is_copied: bool = self._copied.query()
        return is_copied

    def wait_until_copied(self) -> None:
        self._copied.synchronize()

    def receive(self) -> Any:
        consumer = torch.cuda.current_stream(self._device)
        consumer.wait_event(self._ready)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:  # After the tensor is freed, the allocator keeps its memory until the consumer is done.
                tensor.record_stream(consumer)
            return tensor

        return map_tensors(self._batch, record)
