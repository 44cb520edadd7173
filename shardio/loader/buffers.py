"""Buffers: batches in shared memory, reused after their tensors are freed.

The user's tensors are views of a slot's columns. When the last view of a column is freed, in any thread, a reference
goes into a queue. When all columns of a slot are freed, the pool may fill it again. While the user keeps batches, the
pool creates more slots.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.loader.memory import Layout, make_memory
from shardio.process import call_at_fork

SHARE = 0.5
"""The share of the available memory that the slots of one loader may take: the user's program needs some, too."""

_CGROUP = Path("/sys/fs/cgroup")


def find_available_bytes() -> int:
    """Return how much memory this process can still get, in bytes, by the machine and its container."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")] or free
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # There is no such group, or it has no limit.
            free.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
    return max(min(free), 0)


def find_num_slots(num_bytes: int, num_wanted: int) -> int:
    """Return how many slots there is memory for, at most as many as wanted.

    Args:
        num_bytes: The size of a slot.
        num_wanted: How many the loader wants to fill at a time.

    Raises:
        MemoryError: If there is no memory for two: one for the user, and one to fill.
    """
    available = find_available_bytes()
    num_slots = int(available * SHARE) // max(num_bytes, 1)
    if num_slots < 2 and 2 * num_bytes > available:
        raise MemoryError(
            f"two batches of {num_bytes / 1e6:,.0f} MB do not fit into the {available / 1e6:,.0f} MB of memory that "
            "are available: use a smaller batch_size, return smaller samples, or give the container more memory "
            "(docker run --memory)"
        )
    return max(min(num_slots, num_wanted), 2)


Views = dict[int, NDArray[Any]]
"""The columns of a slot, by field index."""

Spans = Mapping[int, tuple[int, int]]
"""The first byte of each piece of a slot, and the one after its last."""

MemoryCallback = Callable[[NDArray[np.uint8]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotWatch:
    """What a wrapper of a loader, such as a DevicePrefetcher, does with the slots of the epochs that it begins.

    Attributes:
        callback: Called once with each slot's memory, uint8 [n], which lives as long as any view of it.
        num_held: How many batches the wrapper holds, besides those of the user.
    """

    callback: MemoryCallback
    num_held: int


class _ColumnRef(weakref.ref["NDArray[Any]"]):
    """A weak reference to a column that the user holds. When the column is freed, C code puts it into a queue."""

    __slots__ = ("slot_id",)
    slot_id: int


class Slot:
    """Memory for a batch in the training process.

    Attributes:
        slot_id: Its number, which is never reused.
        layout: The layout of a batch in it.
        is_retired: Whether it must not be filled again.
    """

    def __init__(self, slot_id: int, layout: Layout, memory: NDArray[np.uint8]) -> None:
        self.slot_id = slot_id
        self.layout = layout
        self.is_retired = False
        self._memory = memory
        self._columns: list[_ColumnRef] = []

    def hand_out(self, freed: SimpleQueue[_ColumnRef], spans: Spans | None) -> Views:
        """Return the columns, or pieces. When one and all views of it are freed, its reference goes into ``freed``.

        A tensor's storage holds the array that it was made from, so the array lives as long as any view of it.
        """
        if spans is None:
            views = self.layout.views(self._memory)
        else:
            views = {index: self._memory[start:stop] for index, (start, stop) in spans.items()}
        for view in views.values():
            column = _ColumnRef(view, freed.put)
            column.slot_id = self.slot_id
            self._columns.append(column)
        return views

    def release(self, column: _ColumnRef) -> bool:
        """Remove a freed column; return whether it was the last one."""
        self._columns.remove(column)
        return not self._columns


class SlotPool:
    """The slots of one loader, in the process that created it. Call :meth:`lay_out` before :meth:`take`.

    Args:
        announce: Called with a new slot's id, layout and descriptor before its first use.
        forget: Called with the ids of slots that will not be filled again.

    Attributes:
        layout: The layout of a batch in a slot; None before :meth:`lay_out`.
    """

    def __init__(
        self,
        announce: Callable[[int, Layout, int], None],
        forget: Callable[[tuple[int, ...]], None],
    ) -> None:
        self.layout: Layout | None = None
        self._num_spare = 0
        self._announce, self._forget = announce, forget
        self._watches: tuple[SlotWatch, ...] = ()
        self._freed: SimpleQueue[_ColumnRef] = SimpleQueue()
        self._free: list[Slot] = []
        self._taken: dict[int, Slot] = {}
        self._held: dict[int, Slot] = {}
        self._num_made = 0
        # A forked child shares the pages of the batches that the user holds, so those must not change. Retire them both
        # before and after: another thread may receive a batch in between, which the child then holds too.
        call_at_fork(self, before=SlotPool.retire_held, after_in_parent=SlotPool.retire_held)

    def watch(self, watches: Sequence[SlotWatch]) -> None:
        """From now on, fill only slots that these watches have received.

        What a watch did to the memory of a slot, such as registering it with CUDA, must not affect an epoch that the
        wrapper did not begin.
        """
        if tuple(watches) != self._watches:
            self.retire()
            self._watches = tuple(watches)

    def lay_out(self, layout: Layout, num_spare: int) -> None:
        """Use slots of this layout from now on.

        Args:
            layout: The layout of a batch in a slot.
            num_spare: How many free slots to keep, besides those for the watches. The pool drops any more, which it
                created while the user kept batches.
        """
        self.layout, self._num_spare = layout, num_spare
        self._drop_free()

    def take(self) -> Slot:
        """Return a slot to fill. The layout must have columns."""
        self.collect()
        slot = self._free.pop() if self._free else self._make()
        self._taken[slot.slot_id] = slot
        return slot

    def hand_out(self, slot: Slot, spans: Spans | None = None) -> Views:
        """Return a filled slot's columns. The slot returns to the pool when nothing holds them any more.

        Args:
            slot: The slot.
            spans: The pieces to return instead of columns, at least one: the first byte of each, and the one after its
                last.
        """
        self._held[slot.slot_id] = self._taken.pop(slot.slot_id)
        return slot.hand_out(self._freed, spans)

    def put_back(self, slots: Iterable[Slot]) -> None:
        """Take back slots whose content is no longer needed. No worker may still be filling them."""
        superfluous, num_spare = [], self._num_spare + sum(watch.num_held for watch in self._watches)
        for slot in slots:
            self._taken.pop(slot.slot_id, None)
            if slot.is_retired or slot.layout is not self.layout or len(self._free) >= num_spare:
                superfluous.append(slot)
            else:
                self._free.append(slot)
        self.drop(superfluous)

    def drop(self, slots: Iterable[Slot]) -> None:
        """Drop slots, even if a worker is still filling them."""
        slot_ids = tuple(slot.slot_id for slot in slots)
        for slot_id in slot_ids:
            self._taken.pop(slot_id, None)
        if slot_ids:
            self._forget(slot_ids)

    def retire(self) -> None:
        """Retire all current slots. A restarted worker process, for example, does not know them."""
        for slot in self._taken.values():
            slot.is_retired = True
        self.retire_held()
        self._drop_free()

    def retire_held(self) -> None:
        """Retire the slots that the user holds, so that they are never filled again."""
        for slot in list(self._held.values()):
            slot.is_retired = True

    def collect(self) -> None:
        """Take back the slots that the user has freed."""
        freed = []
        with suppress(Empty):
            while True:
                column = self._freed.get_nowait()
                if self._held[column.slot_id].release(column):
                    freed.append(self._held.pop(column.slot_id))
        self.put_back(freed)

    def close(self) -> None:
        """Release all slots. Those that the user holds are freed with the user's tensors."""
        self._free = []
        self._taken.clear()
        self._held.clear()

    def _drop_free(self) -> None:
        free, self._free = self._free, []
        self.drop(free)

    def _make(self) -> Slot:
        assert self.layout is not None, "lay_out was called"
        descriptor = make_memory(self.layout.num_bytes)
        try:
            memory = map_in_torch(descriptor, self.layout.num_bytes)
            self._announce(self._num_made, self.layout, descriptor)
        finally:
            os.close(descriptor)
        self._num_made += 1
        for watch in self._watches:
            watch.callback(memory)
        return Slot(self._num_made - 1, self.layout, memory)


def map_in_torch(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map memory with torch, which keeps no descriptor: the user may hold many batches. Tensors may view it."""
    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", shared=True, nbytes=num_bytes)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]  # it takes storages, too
    return memory.numpy()
