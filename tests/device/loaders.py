"""A small loader with a state, for tests of wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class CountingLoader:
    """Yields batches and counts them. Raises ``error``, if given, after the last one."""

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
