"""Slots: batch buffers in shared memory, used again when nobody holds their tensors any more.

The user's tensors are views of a slot. When the last storage over it is freed, wherever and by whatever thread, the
slot's number is put into a queue, and the ring may have it filled again. A user who keeps batches gets more slots.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.loader.memory import Layout, make_memory

Views = dict[int, NDArray[Any]]
"""The columns of a slot, by the place of their field."""

OnMemory = Callable[[NDArray[np.uint8]], None]


class _Watch(weakref.ref["NDArray[Any]"]):
    """A reference to a column that the user has. When that is freed, it goes to a queue, without any Python code."""

    __slots__ = ("slot_id",)
    slot_id: int


class Slot:
    """Memory for a batch, as the training process has it.

    Attributes:
        slot_id: Its number, never used again.
        layout: How a batch lies in it.
        is_retired: Whether it must not be filled again.
    """

    def __init__(self, slot_id: int, layout: Layout, memory: NDArray[np.uint8]) -> None:
        self.slot_id = slot_id
        self.layout = layout
        self.is_retired = False
        self._memory = memory
        self._num_told = 0
        self._watches: list[_Watch] = []

    def views(self) -> Views:
        """Return the columns."""
        return self.layout.views(self._memory)

    def tell(self, watchers: Sequence[OnMemory]) -> None:
        """Tell those of the memory who have not been told yet: more may come at any time."""
        for watcher in watchers[self._num_told :]:
            watcher(self._memory)
        self._num_told = len(watchers)

    def hand_out(self, freed: SimpleQueue[_Watch]) -> Views:
        """Return the columns, and have something put into ``freed`` when what was made of one is freed.

        A tensor's storage holds the array that it was made of, so the array lives as long as any view of it.
        """
        views = self.views()
        for view in views.values():
            watch = _Watch(view, freed.put)
            watch.slot_id = self.slot_id
            self._watches.append(watch)
        return views

    def release(self, watch: _Watch) -> bool:
        """Note that a column was freed; return whether it was the last."""
        self._watches.remove(watch)
        return not self._watches


class SlotRing:
    """The slots of one loader, in the process that made it.

    Args:
        layout: How a batch lies in a slot.
        num_spare: How many free slots are kept. Others were made for batches that the user kept, and are given back.
        announce: Told of a new slot's number, layout and descriptor, before it is first used.
        forget: Told the numbers of slots that will not be filled again.
        watchers: Told of each slot's memory, uint8 [n], which lives as long as anybody holds a part of it.
    """

    def __init__(
        self,
        layout: Layout,
        num_spare: int,
        announce: Callable[[int, Layout, int], None],
        forget: Callable[[tuple[int, ...]], None],
        watchers: Sequence[OnMemory],
    ) -> None:
        self._layout = layout
        self._num_spare = num_spare
        self._announce, self._forget, self._watchers = announce, forget, watchers
        self._freed: SimpleQueue[_Watch] = SimpleQueue()
        self._free: list[Slot] = []
        self._held: dict[int, Slot] = {}
        self._num_made = 0
        _watch_forks()
        _rings[id(self)] = weakref.ref(self, partial(_rings.pop, id(self)))

    def lay_out(self, layout: Layout, num_spare: int) -> None:
        """Use slots of another layout from here on."""
        self._layout, self._num_spare = layout, num_spare
        self.drop(self._free)
        self._free = []

    def take(self) -> Slot:
        """Return a slot to fill."""
        self.collect()
        slot = self._free.pop() if self._free else self._make()
        slot.tell(self._watchers)
        return slot

    def hand_out(self, slot: Slot) -> Views:
        """Return a filled slot's columns; the slot comes back by itself when nobody holds them any more."""
        self._held[slot.slot_id] = slot
        return slot.hand_out(self._freed)

    def put_back(self, slots: Iterable[Slot]) -> None:
        """Take back slots whose content is not wanted any more, and which nobody is filling."""
        superfluous = []
        for slot in slots:
            if slot.is_retired or slot.layout is not self._layout or len(self._free) >= self._num_spare:
                superfluous.append(slot)
            else:
                self._free.append(slot)
        self.drop(superfluous)

    def drop(self, slots: Sequence[Slot]) -> None:
        """Abandon slots that were taken: a worker may still be filling them."""
        if slots:
            self._forget(tuple(slot.slot_id for slot in slots))

    def retire(self, filled: Sequence[Slot]) -> None:
        """Fill none of today's slots again: not all hosts know them.

        Args:
            filled: Those that were taken, and not handed out or dropped.
        """
        for slot in filled:
            slot.is_retired = True
        self.retire_held()
        self.drop(self._free)
        self._free = []

    def retire_held(self) -> None:
        """Do not fill the slots again that are with the user."""
        for slot in list(self._held.values()):
            slot.is_retired = True

    def collect(self) -> None:
        """Take back what the user has freed."""
        freed = []
        with suppress(Empty):
            while True:
                watch = self._freed.get_nowait()
                if self._held[watch.slot_id].release(watch):
                    freed.append(self._held.pop(watch.slot_id))
        self.put_back(freed)

    def _make(self) -> Slot:
        descriptor = make_memory(self._layout.num_bytes)
        try:
            memory = _map(descriptor, self._layout.num_bytes)
            self._announce(self._num_made, self._layout, descriptor)
        finally:
            os.close(descriptor)
        self._num_made += 1
        return Slot(self._num_made - 1, self._layout, memory)


def _map(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map memory by torch, which keeps no descriptor: the user may hold many batches."""
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", shared=True, nbytes=num_bytes)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]  # it takes storages, too
    return memory.numpy()


_rings: dict[int, weakref.ref[SlotRing]] = {}


@cache
def _watch_forks() -> None:
    # A forked child shares the pages of the batches that are out: they must stay as they are. Before and after, for a
    # batch that another thread gets in between is held by the child, too.
    os.register_at_fork(before=_retire_held, after_in_parent=_retire_held)


def _retire_held() -> None:
    for reference in list(_rings.values()):  # At once: other threads may make rings meanwhile.
        if (ring := reference()) is not None:
            ring.retire_held()
