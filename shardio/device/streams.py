"""A stream beside the one that computes: what crosses to the device on it, and when that has arrived.

This is all that the prefetcher knows of CUDA's asynchronous side, so that its logic can be run against another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from shardio.device.batches import map_tensors


class Crossing(Protocol):
    """A batch on its way."""

    def is_copied(self) -> bool:
        """Return whether nothing more is read from the memory that it came from."""

    def wait_until_copied(self) -> None:
        """Wait for that."""

    def receive(self) -> Any:
        """Return what arrived; whatever the caller's stream does from now on waits for it."""


class Mark(Protocol):
    """A moment in the stream of the consumer."""

    def wait(self) -> None:
        """Wait until the device is as far."""


class SideStream(Protocol):
    """A stream of its own."""

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> Crossing:
        """Queue a copy on the device, and its preparation after it.

        It is done in this order, behind what was sent before, and behind what the caller's stream has to do already: so
        memory that the caller has freed is not written to while the device still reads it.
        """

    def mark(self) -> Mark:
        """Mark the moment up to which the consumer has given the device work."""


class CudaStream:
    """A stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, copy: Callable[[], Any], prepare: Callable[[Any], Any]) -> Crossing:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            there = copy()
            copied = self._stream.record_event()
            made = prepare(there)
            ready = self._stream.record_event()
        return CudaCrossing(self._device, made, copied, ready)

    def mark(self) -> Mark:
        return CudaMark(torch.cuda.current_stream(self._device).record_event())


class CudaCrossing:
    """A batch on a CUDA stream."""

    def __init__(self, device: torch.device, made: Any, copied: torch.cuda.Event, ready: torch.cuda.Event) -> None:
        self._device, self._made, self._copied, self._ready = device, made, copied, ready

    def is_copied(self) -> bool:
        is_copied: bool = self._copied.query()
        return is_copied

    def wait_until_copied(self) -> None:
        self._copied.synchronize()

    def receive(self) -> Any:
        consumer = torch.cuda.current_stream(self._device)
        consumer.wait_event(self._ready)

        def record(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_cuda:  # The consumer may free it on whatever stream: its memory waits for this one.
                tensor.record_stream(consumer)
            return tensor

        return map_tensors(self._made, record)


class CudaMark:
    """An event in a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
