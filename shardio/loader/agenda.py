"""The agenda: which parts of batches a crew was given to make, and which wait until one is made alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.loader.crews import Crew
from shardio.loader.messages import Chunk
from shardio.loader.pending import Batch, Part

Asked = tuple[Batch, Part]
"""Parts do not refer to their batches: such a cycle would keep slots until the garbage collector comes."""


class Agenda:
    """What is to be made, and not answered.

    Args:
        crew: Makes it.
        locate: Returns what a reader reads samples by, from their numbers.
        epoch_began: When the epoch began, by ``time.perf_counter``.
    """

    def __init__(self, crew: Crew, locate: Callable[[NDArray[np.int64]], Any], epoch_began: float) -> None:
        self._crew, self._locate, self._epoch_began = crew, locate, epoch_began
        self._at_work: dict[int, Asked] = {}  # By serial.
        self._held_back: deque[Asked] = deque()

    def add(self, batch: Batch, parts: Sequence[Part]) -> None:
        """Queue parts of a batch."""
        self._held_back.extend((batch, part) for part in parts)
        self.submit()

    def submit(self) -> None:
        """Hand on all that may be made now: a part that may have killed a host is made when nothing else is."""
        chunks = []
        while self._held_back and not (self._at_work and (self._held_back[0][1].is_suspect or self._tries_suspect)):
            batch, part = self._held_back.popleft()
            if batch.error is not None:
                continue
            chunk = Chunk(
                serial=self._crew.next_serial(),
                samples=self._locate(part.plan.numbers),
                rng_keys=part.plan.rng_keys,
                slot_id=None if batch.slot is None else batch.slot.slot_id,
                row=part.row,
                epoch_began=self._epoch_began,
            )
            self._at_work[chunk.serial] = batch, part
            chunks.append(chunk)
        if chunks:
            self._crew.submit(chunks)

    def find(self, serials: Iterable[int]) -> list[Asked]:
        """Return what is made under some numbers, if it is still wanted."""
        return [self._at_work[serial] for serial in serials if serial in self._at_work]

    def pop(self, serial: int) -> Asked | None:
        """Take off what was answered; None if nobody wants it any more."""
        return self._at_work.pop(serial, None)

    def drop(self, batch: Batch) -> None:
        """Take off all of a batch that failed."""
        self._at_work = {serial: asked for serial, asked in self._at_work.items() if asked[0] is not batch}

    def clear(self) -> list[Batch]:
        """Take off everything; return the batches."""
        batches = dict.fromkeys(batch for batch, _ in (*self._at_work.values(), *self._held_back))
        self._at_work.clear()
        self._held_back.clear()
        return list(batches)

    @property
    def _tries_suspect(self) -> bool:
        return any(part.is_suspect for _, part in islice(self._at_work.values(), 1))  # It is the only one then.
