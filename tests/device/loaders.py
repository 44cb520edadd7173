"""A small loader with a state, and a count of pinned buffers, for tests of the prefetcher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardio.device import DevicePrefetcher


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
