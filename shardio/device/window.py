"""Batches that are under way to the device, and the memory that they are copied out of."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from shardio.device.batches import map_tensors
from shardio.device.pinned import PinnedPool
from shardio.device.streams import Crossing, Mark, SideStream


class _Sent(NamedTuple):
    crossing: Crossing
    note: Any


class _Source(NamedTuple):
    """What a crossing reads: the loader's own memory, which it may use again as soon as we let go, and our buffers."""

    crossing: Crossing
    batch: Any
    buffers: list[torch.Tensor]


class Window:
    """The batches of one iteration that are under way. Closing it waits until nothing is copied any more.

    Args:
        side: The stream that they cross on.
        pool: Buffers for what does not lie in pinned memory.
        copy: Copies a batch to the device.
        prepare: Makes of that what is received.
    """

    def __init__(
        self, side: SideStream, pool: PinnedPool, copy: Callable[[Any], Any], prepare: Callable[[Any], Any]
    ) -> None:
        self._side, self._pool = side, pool
        self._copy, self._prepare = copy, prepare
        self._sent: deque[_Sent] = deque()
        self._sources: deque[_Source] = deque()
        self._marks: deque[Mark] = deque()

    @property
    def num_under_way(self) -> int:
        """How many batches were sent and not received."""
        return len(self._sent)

    def send(self, batch: Any, note: Any) -> None:
        """Send a batch, and a note that is received with it."""
        self._release()
        buffers: list[torch.Tensor] = []

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
                return tensor
            if type(tensor) is not torch.Tensor:  # A mask, say, of which a copy would not know that it is one.
                return tensor
            pinned, buffer = self._pool.take(tensor)
            buffers.append(buffer)
            return pinned

        pinned = map_tensors(batch, pin)
        crossing = self._side.send(lambda: self._copy(pinned), self._prepare)
        self._sources.append(_Source(crossing, pinned, buffers))
        self._sent.append(_Sent(crossing, note))

    def receive(self) -> tuple[Any, Any]:
        """Return the next batch, on the device, and the note that was sent with it."""
        crossing, note = self._sent.popleft()
        return crossing.receive(), note

    def follow(self, distance: int) -> None:
        """Wait while the consumer has given the device more than the work of ``distance`` batches.

        Nothing else keeps a fast program from getting ahead of its device, each step with memory of its own.
        """
        self._marks.append(self._side.mark())
        if len(self._marks) > distance:
            self._marks.popleft().wait()

    def close(self) -> None:
        """Wait until nothing is copied any more, and let go of everything."""
        for source in self._sources:
            source.crossing.wait_until_copied()
        self._release()
        self._sent.clear()
        self._marks.clear()

    def _release(self) -> None:
        """Release what has been copied."""
        while self._sources and self._sources[0].crossing.is_copied():
            for buffer in self._sources.popleft().buffers:
                self._pool.put_back(buffer)


class Here:
    """The same where there is no stream: a batch is prepared when it is sent.

    Args:
        prepare: Copies a batch to the device, and makes of it what is received.
    """

    def __init__(self, prepare: Callable[[Any], Any]) -> None:
        self._prepare = prepare
        self._sent: deque[tuple[Any, Any]] = deque()

    @property
    def num_under_way(self) -> int:
        """How many batches were sent and not received."""
        return len(self._sent)

    def send(self, batch: Any, note: Any) -> None:
        """Prepare a batch."""
        self._sent.append((self._prepare(batch), note))

    def receive(self) -> tuple[Any, Any]:
        """Return the next batch, and the note that was sent with it."""
        return self._sent.popleft()

    def follow(self, distance: int) -> None:
        """There is nothing to wait for."""

    def close(self) -> None:
        """Release everything."""
        self._sent.clear()
