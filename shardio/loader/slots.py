"""Slots: batch buffers in shared memory, used again when nobody holds their tensors any more.

The user's tensors are views of a slot. When the last storage over it is freed, wherever and by whatever thread, the
slot's number is put into a queue, and the ring may have it filled again. A user who keeps batches gets more slots.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.loader.memory import Layout, make_memory

Views = dict[int, NDArray[Any]]
"""The columns of a slot, by the place of their field."""


class Slot:
    """Memory for a batch, as the training process has it.

    Attributes:
        slot_id: Its number, never used again.
        is_retired: Whether it must not be filled again.
    """

    def __init__(self, slot_id: int, layout: Layout, memory: NDArray[np.uint8]) -> None:
        self.slot_id = slot_id
        self.is_retired = False
        self._layout = layout
        self._memory = memory
        self._watched: list[weakref.ref[NDArray[Any]]] = []
        self._num_held = 0

    def views(self) -> Views:
        """Return the columns."""
        return self._layout.views(self._memory)

    def hand_out(self, on_freed: Callable[[object], None]) -> Views:
        """Return the columns, and call ``on_freed`` when what was made of one of them is freed, once for each.

        A tensor's storage holds the array that it was made of, so the array lives as long as any view of it.
        """
        views = self.views()
        self._num_held = len(views)
        self._watched = [weakref.ref(view, on_freed) for view in views.values()]
        return views

    def release(self) -> bool:
        """Count one column as freed; return whether it was the last."""
        self._num_held -= 1
        return not self._num_held


class _Returns:
    """Where freed columns are announced, by their slots' numbers."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[int] = SimpleQueue()

    def add(self, slot_id: int, _: object) -> None:
        """Do what a finalizer may do: it runs in any thread at any time, also in the middle of the queue's own code."""
        self.queue.put(slot_id)


class SlotRing:
    """The slots of one loader, in the process that made it.

    Args:
        layout: How a batch lies in a slot.
        num_spare: How many free slots are kept. Others were made for batches that the user kept, and are given back.
        announce: Told of a new slot's number, layout and descriptor, before it is first used.
        forget: Told the numbers of slots that will not be filled again.
    """

    def __init__(
        self,
        layout: Layout,
        num_spare: int,
        announce: Callable[[int, Layout, int], None],
        forget: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.layout = layout
        self._num_spare = num_spare
        self._announce, self._forget = announce, forget
        self._returns = _Returns()
        self._free: list[Slot] = []
        self._held: dict[int, Slot] = {}
        self._num_made = 0
        _watch_forks()
        _rings.add(self)

    def take(self) -> Slot:
        """Return a slot to fill."""
        self._collect()
        return self._free.pop() if self._free else self._make()

    def hand_out(self, slot: Slot) -> Views:
        """Return a filled slot's columns; the slot comes back by itself when nobody holds them any more."""
        self._held[slot.slot_id] = slot
        return slot.hand_out(partial(self._returns.add, slot.slot_id))

    def put_back(self, slot: Slot) -> None:
        """Take back a slot whose content is not wanted, and which nobody is filling."""
        if slot.is_retired:
            self.drop([slot])
        else:
            self._free.append(slot)

    def drop(self, slots: Sequence[Slot]) -> None:
        """Have nothing more to do with slots that were taken: somebody may still be filling them."""
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

    def leave_to_parent(self) -> None:
        """In a forked child: take no notice of what is freed here."""
        self._returns.queue = SimpleQueue()

    def _make(self) -> Slot:
        descriptor = make_memory(self.layout.num_bytes)
        try:
            memory = _map(descriptor, self.layout.num_bytes)
            self._announce(self._num_made, self.layout, descriptor)
        finally:
            os.close(descriptor)
        self._num_made += 1
        return Slot(self._num_made - 1, self.layout, memory)

    def _collect(self) -> None:
        """Take back what the user has freed."""
        gone = list[Slot]()
        while True:
            try:
                slot_id = self._returns.queue.get_nowait()
            except Empty:
                break
            if self._held[slot_id].release():
                slot = self._held.pop(slot_id)
                (gone if slot.is_retired or len(self._free) >= self._num_spare else self._free).append(slot)
        self.drop(gone)


def _map(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map memory by torch, which keeps no descriptor: the user may hold many batches."""
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", shared=True, nbytes=num_bytes)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]  # it takes storages, too
    return memory.numpy()


_rings: weakref.WeakSet[SlotRing] = weakref.WeakSet()


@cache
def _watch_forks() -> None:
    # A forked child shares the pages of the batches that are out: they must stay as they are.
    os.register_at_fork(before=_retire_held, after_in_parent=_retire_held, after_in_child=_leave_to_parent)


def _retire_held() -> None:
    # Before and after: a batch that another thread got in between is held by the child, too.
    for ring in list(_rings):
        ring.retire_held()


def _leave_to_parent() -> None:
    for ring in list(_rings):
        ring.leave_to_parent()
