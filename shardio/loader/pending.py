"""Batches that are under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardio.images import DecoderName
from shardio.loader.batches import BatchPlan
from shardio.loader.messages import Column
from shardio.loader.slots import Slot


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """A part of a batch, which is made as one chunk."""

    plan: BatchPlan
    row: int
    columns: list[Column] | None = None
    num_images_by_decoder: Counter[DecoderName] = field(default_factory=Counter)  # How many images who decoded.
    num_tries: Counter[int] = field(default_factory=Counter)  # By place, where samples are replaced.
    skipped: list[str] = field(default_factory=list)  # Keys.
    num_deaths: int = 0  # Of hosts that made nothing else.
    is_suspect: bool = False  # Of having killed a host, perhaps.


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """A batch that is being made, or waits to be taken."""

    slot: Slot | None
    parts: list[Part] = field(default_factory=list)
    error: BaseException | None = None
    is_probe: bool = False  # Made to see what is of fixed size, and not for the user.

    @property
    def is_made(self) -> bool:
        return all(part.columns is not None for part in self.parts)

    @property
    def num_samples(self) -> int:
        return sum(len(part.plan) for part in self.parts)

    @property
    def num_images_by_decoder(self) -> Counter[DecoderName]:
        return sum((part.num_images_by_decoder for part in self.parts), Counter())


def sort_slots(batches: Iterable[Batch]) -> tuple[list[Slot], list[Slot]]:
    """Return the slots to which somebody may still be writing, and those that are filled."""
    filling = [batch.slot for batch in batches if batch.slot is not None and not batch.is_made]
    filled = [batch.slot for batch in batches if batch.slot is not None and batch.is_made]
    return filling, filled
