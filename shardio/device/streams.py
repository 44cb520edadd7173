"""The stream that copies batches to the device while the consumer computes on another stream.

This is the only module that uses CUDA streams and events, so tests can run the prefetcher on a simulated stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardio.device.batches import map_tensors


class StreamEvent(Protocol):
    """A point in the work that is queued on a stream."""

    def query(self) -> bool:
        """Return whether the stream has reached this point."""

    def synchronize(self) -> None:
        """Wait until the stream reaches this point."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Return the milliseconds from this point to a later one of the same stream. Both were reached."""


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch on its way to the device.

    Attributes:
        copied: When the device has finished reading the source memory.
        ready: When the batch is ready on the device.
        batch: The batch on the device, in the form that the stream needs to receive it.
    """

    copied: StreamEvent
    ready: StreamEvent
    batch: Any


class CopyStream(Protocol):
    """A stream for copies."""

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> SentBatch:
        """Queue a copy to the device and the preparation of the copied batch.

        Both run after all earlier sends, and after the work that is already queued on the caller's
        stream. So memory that the caller has freed is not overwritten while the device still reads
        it.
        """

    def receive(self, sent: SentBatch) -> Any:
        """Return the batch on the device. Later work on the caller's stream waits for it."""

    def record_event(self) -> StreamEvent:
        """Return an event after the work that is queued on the caller's stream."""


class CudaStream:
    """A stream of a CUDA device. Its events block, so that a wait leaves the processor core to the loader's workers.

    Args:
        device: The device, with an index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> SentBatch:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copied_batch = copy()
            copied = self._stream.record_event(torch.cuda.Event(blocking=True))
            batch = prepare(copied_batch)
            ready = self._stream.record_event(torch.cuda.Event(blocking=True))
        return SentBatch(copied=copied, ready=ready, batch=batch)

    def receive(self, sent: SentBatch) -> Any:
        consumer = torch.cuda.current_stream(self._device)
        consumer.wait_event(sent.ready)  # type: ignore[arg-type]  # send() recorded it on CUDA.

        def record(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:  # After the tensor is freed, the allocator keeps its memory until the consumer is done.
                for part in _find_dense_parts(tensor):
                    part.record_stream(consumer)
            return tensor

        return map_tensors(sent.batch, record)

    def record_event(self) -> StreamEvent:
        event: StreamEvent = torch.cuda.current_stream(self._device).record_event(
            torch.cuda.Event(enable_timing=True, blocking=True)
        )
        return event


def _find_dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold a sparse tensor's memory, or the tensor itself: only those know streams."""
    match tensor.layout:
        case torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        case torch.sparse_csr | torch.sparse_bsr:
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        case torch.sparse_csc | torch.sparse_bsc:
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
        case _:
            return [tensor]
