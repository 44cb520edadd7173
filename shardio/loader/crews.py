"""Who makes chunks, and into which memory: hosts into slots, or the training process itself into arrays of its own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from shardio.decoding import FieldDecoder
from shardio.interruptions import let_through
from shardio.loader.deaths import Death
from shardio.loader.hosts import HostPool
from shardio.loader.maker import ChunkMaker
from shardio.loader.memory import Layout
from shardio.loader.messages import Chunk, Failed, Outcome, Plan
from shardio.loader.slots import OnMemory, Slot, SlotRing, Views
from shardio.reading import FileReader, SampleReader


class Crew(ABC):
    """Makes chunks, in the order in which they are submitted.

    Attributes:
        num_threads: How many chunks it makes at a time.
        works_ahead: Whether it works while nobody waits for it.
        layout: How a batch lies in a slot; None before :meth:`lay_out`, or if nothing is of fixed size.
        is_laid_out: Whether :meth:`lay_out` was called.
    """

    works_ahead: bool

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.layout: Layout | None = None
        self.is_laid_out = False
        self._num_chunks = 0

    def lay_out(self, layout: Layout | None, num_ahead: int) -> None:
        """Say how a batch lies in a slot, and how many are made ahead of the one that is wanted."""
        self.layout, self.is_laid_out = layout, True

    @abstractmethod
    def is_here(self) -> bool:
        """Say whether it works for this process, and not for one from which this one was forked."""

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether it can work no more."""

    def next_serial(self) -> int:
        """Return the next chunk's number."""
        self._num_chunks += 1
        return self._num_chunks

    @abstractmethod
    def take(self) -> Slot:
        """Return a slot to fill; there must be a layout."""

    @abstractmethod
    def hand_out(self, slot: Slot) -> Views:
        """Return a filled slot's columns, for the user."""

    @abstractmethod
    def give_up(self, filling: Sequence[Slot], filled: Sequence[Slot]) -> None:
        """Take back slots that somebody may still be filling, and some that are filled."""

    @abstractmethod
    def renew(self, filling: Sequence[Slot], filled: Sequence[Slot]) -> None:
        """After a death: give up what was being filled; use no slot again that there is."""

    @abstractmethod
    def submit(self, chunks: Iterable[Chunk]) -> None:
        """Send chunks to those who make them."""

    @abstractmethod
    def receive(self, timeout_s: float | None) -> list[Outcome | Death]:
        """Return what became of chunks; wait for it at most so long, or less."""

    @abstractmethod
    def cancel(self) -> None:
        """Want nothing any more of what was submitted."""

    @abstractmethod
    def close(self) -> None:
        """Stop working."""


class HostCrew(Crew):
    """Hosts, and a ring of slots. It lives until it is closed, or nobody refers to it any more."""

    works_ahead = True

    def __init__(self, plan: Plan, memory_watchers: Sequence[OnMemory]) -> None:
        super().__init__(plan.num_threads)
        self._memory_watchers = memory_watchers
        self._process_id = os.getpid()
        self._is_closed = False
        self._pool = HostPool(plan)
        self._ring: SlotRing | None = None

    def is_here(self) -> bool:
        return self._process_id == os.getpid()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def lay_out(self, layout: Layout | None, num_ahead: int) -> None:
        super().lay_out(layout, num_ahead)
        num_spare = num_ahead + 2  # One batch is with the user, and the one before it, while the next is asked for.
        if self._ring is not None and layout is not None:
            self._ring.lay_out(layout, num_spare)
        elif layout is not None:
            self._ring = SlotRing(layout, num_spare, self._pool.announce, self._pool.forget, self._memory_watchers)

    def take(self) -> Slot:
        assert self._ring is not None, "it was laid out"
        return self._ring.take()

    def hand_out(self, slot: Slot) -> Views:
        assert self._ring is not None, "it was laid out"
        return self._ring.hand_out(slot)

    def give_up(self, filling: Sequence[Slot], filled: Sequence[Slot]) -> None:
        if self._ring is not None:
            self._ring.collect()
            self._ring.drop(filling)
            self._ring.put_back(filled)

    def renew(self, filling: Sequence[Slot], filled: Sequence[Slot]) -> None:
        if self._ring is not None:
            self._ring.drop(filling)
            self._ring.retire(filled)

    def submit(self, chunks: Iterable[Chunk]) -> None:
        self._pool.submit(chunks)

    def receive(self, timeout_s: float | None) -> list[Outcome | Death]:
        return self._pool.receive(timeout_s)

    def cancel(self) -> None:
        self._pool.cancel()

    def close(self) -> None:
        self._is_closed = True
        self._pool.close()
        self._ring = None  # What the user holds stays, and is freed with what holds it.


class CallerCrew(Crew):
    """The training process itself: it makes a chunk when it wants to receive one."""

    works_ahead = False

    def __init__(self, reader: SampleReader | FileReader, decoder: FieldDecoder) -> None:
        super().__init__(1)
        self._reader = reader
        self._maker = ChunkMaker(reader, decoder)
        self._chunks: deque[Chunk] = deque()
        self._views: dict[int, Views] = {}
        self._num_taken = 0

    def is_here(self) -> bool:
        return True

    @property
    def is_closed(self) -> bool:
        return False  # It reads again when it is asked to.

    def take(self) -> Slot:
        assert self.layout is not None, "it was laid out"
        slot = Slot(self._num_taken, self.layout, np.empty(self.layout.num_bytes, np.uint8))
        self._num_taken += 1
        self._views[slot.slot_id] = slot.views()
        return slot

    def hand_out(self, slot: Slot) -> Views:
        return self._views.pop(slot.slot_id)

    def give_up(self, filling: Sequence[Slot], filled: Sequence[Slot]) -> None:
        for slot in (*filling, *filled):
            del self._views[slot.slot_id]
        given_up = {slot.slot_id for slot in filling}
        self._chunks = deque(chunk for chunk in self._chunks if chunk.slot_id not in given_up)

    def renew(self, filling: Sequence[Slot], filled: Sequence[Slot]) -> None:
        raise AssertionError("the training process does not die")

    def submit(self, chunks: Iterable[Chunk]) -> None:
        self._chunks.extend(chunks)

    def receive(self, timeout_s: float | None) -> list[Outcome | Death]:
        chunk = self._chunks.popleft()
        views = {} if chunk.slot_id is None else self._views[chunk.slot_id]
        try:
            return [self._maker.make(chunk, {place: view[chunk.rows] for place, view in views.items()})]
        except Exception as error:  # Not Ctrl-C and its like, which are no news of the chunk: they end the iteration.
            let_through(error)
            return [Failed(serial=chunk.serial, error=error, traceback=None)]

    def cancel(self) -> None:
        self._chunks.clear()

    def close(self) -> None:
        self.cancel()
        self._views.clear()
        self._reader.close()
