"""Buffers: batches in anonymous shared memory, reused after their tensors are freed.

The user's tensors are views of a buffer's columns. When any thread frees the last view of a column, a reference to
the column is put into a queue. When all columns of a buffer are freed, the pool may fill it again. While the user keeps
batches, the pool creates more buffers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import TiledChunk, holds_images
from shardio.process import call_at_fork
from shardio.transforms import Ragged
from shardio.values import format_bytes

MIN_BYTES = 4096
"""The minimum size of a piece of memory in a buffer, except for images.

While the user keeps any piece of a buffer, the whole buffer stays alive.
"""

ALIGNMENT = 4096
"""The alignment of arrays, in bytes: each array begins on its own page."""

Column = list[Any] | NDArray[np.generic] | TiledChunk | None
"""The values of one field; None if the values are in a buffer."""


def make_memory(num_bytes: int) -> int:
    """Return the descriptor of new anonymous memory, which is freed when no process has it open or mapped."""
    descriptor = os.memfd_create("shardio", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:  # Close the descriptor even after Ctrl-C.
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int, num_bytes: int, *, is_private: bool = False) -> NDArray[np.uint8]:
    """Map memory for reading and writing, until the array and its views are freed.

    Python's own mmap would keep a duplicate of the descriptor for each mapping.

    Args:
        descriptor: The memory.
        num_bytes: The size of the memory.
        is_private: Whether this process gets a copy of each page that it writes to.

    Raises:
        OSError: If the operating system cannot map the memory.
    """
    flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    address = _libc().mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(
            error, f"{os.strerror(error)}: could not map {num_bytes} bytes: use smaller batches or fewer workers"
        )
    buffer = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(buffer, _libc().munmap, address, num_bytes)
    memory: NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload]  # it is a buffer
    return memory


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a batch's fixed-size columns in a buffer.

    Attributes:
        num_rows: The number of samples in a full batch.
        columns: The dtype and shape of an item of each fixed-size column, by field index. If there are no such columns,
            batches have no buffer.
        takes_tiles: Whether the columns of images hold tiles, for a device to decode.
    """

    num_rows: int
    columns: Mapping[int, tuple[str, tuple[int, ...]]]
    takes_tiles: bool = False

    @cached_property
    def offsets(self) -> dict[int, int]:
        """The byte at which each column begins and, under -1, the end of the last column."""
        offsets, stop = {}, 0
        for column_index, (dtype, shape) in self.columns.items():
            offsets[column_index] = stop
            stop += -(-self.num_rows * np.dtype(dtype).itemsize * prod(shape) // ALIGNMENT) * ALIGNMENT
        return {**offsets, -1: stop}

    @property
    def num_bytes(self) -> int:
        """The size of a buffer."""
        return self.offsets[-1]

    def view(self, memory: NDArray[np.uint8], column_index: int) -> NDArray[np.generic]:
        """Return a column, [num_rows, *shape], of a buffer's memory, uint8 [num_bytes]."""
        dtype, shape = self.columns[column_index]
        start = self.offsets[column_index]
        num_bytes = self.num_rows * np.dtype(dtype).itemsize * prod(shape)
        return memory[start : start + num_bytes].view(dtype).reshape(self.num_rows, *shape)

    def views(self, memory: NDArray[np.uint8]) -> dict[int, NDArray[np.generic]]:
        """Return all columns, by field index."""
        return {column_index: self.view(memory, column_index) for column_index in self.columns}


@dataclass(kw_only=True, eq=False)
class NewBuffer:
    """A new buffer, sent with the descriptor of its memory."""

    buffer_id: int
    layout: Layout


@dataclass(kw_only=True, eq=False)
class ForgetBuffers:
    """Buffers that no later chunk uses."""

    buffer_ids: tuple[int, ...]


class MappedBuffers:
    """The buffers of a loader in a worker process, by id: the layout and the memory of each."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[Layout, NDArray[np.uint8]]] = {}
        self.get = self._buffers.get

    def update(self, message: object, descriptors: Sequence[int]) -> bool:
        """Map a new buffer or drop old ones if a message requests either, and return True; otherwise, return False."""
        match message:
            case NewBuffer():
                memory = map_memory(descriptors[0], message.layout.num_bytes)
                self._buffers[message.buffer_id] = message.layout, memory
                os.close(descriptors[0])
            case ForgetBuffers():
                for buffer_id in message.buffer_ids:
                    self._buffers.pop(buffer_id, None)
            case _:
                return False
        return True


def as_stored(name: str, value: Any) -> NDArray[Any] | None:
    """Return a value as an array that a buffer can store, without copying it; None if a buffer cannot store it.

    Args:
        name: The name of the value's field. In an image field, a uint8 tensor [3, height, width] becomes an
            array [height, width, 3].
        value: The value.
    """
    if isinstance(value, Ragged):
        return None
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if is_tensor:
        value = _as_array(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc" or not value.dtype.isnative:
        return None
    if holds_images(name) and value.dtype == np.uint8 and value.ndim == 3:
        if is_tensor and len(value) == 3:
            value = value.transpose(1, 2, 0)
        elif is_tensor and value.shape[2] == 3:
            return None  # The tensor is not an image, but an array of this shape would be read as an image.
        elif not is_tensor and value.shape[2] != 3:
            return None  # In batches, images that do not have 3 channels are [channels, height, width].
    return value if holds_images(name) or value.nbytes >= MIN_BYTES else None


def is_image(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return whether stored items of this dtype and shape are images [height, width, 3]."""
    return holds_images(name) and dtype == np.uint8 and len(shape) == 3 and shape[2] == 3


def _as_array(tensor: Any) -> NDArray[Any] | None:
    """Return a tensor's memory as an array; None if numpy cannot read it."""
    torch = sys.modules["torch"]
    try:
        array: NDArray[Any] = tensor.as_subclass(torch.Tensor).numpy()
    except (RuntimeError, TypeError):
        # The tensor is sparse or on another device, requires a gradient, or has a dtype that numpy lacks.
        return None
    return array


SHARE = 0.5
"""The share of the available memory that the buffers of one loader may use: the user's program also needs memory."""

_CGROUP = Path("/sys/fs/cgroup")

Views = dict[int, NDArray[Any]]
"""The columns of a buffer, by field index."""

Spans = Mapping[int, tuple[int, int]]
"""The start and the end (exclusive) of each piece of memory in a buffer, in bytes, by piece index."""

MemoryCallback = Callable[[NDArray[np.uint8]], None]


def find_available_bytes() -> int:
    """Return the number of bytes that this process can allocate within the limits of the machine and container."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, IndexError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")] or free
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # The control group does not exist, or has no limit.
            free.append(int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
    return max(min(free), 0)


def find_num_buffers(num_bytes: int, num_wanted: int) -> int:
    """Return the number of buffers that fit in memory, at most ``num_wanted``.

    Args:
        num_bytes: The size of a buffer.
        num_wanted: The maximum number of buffers that the loader can use at once.

    Raises:
        MemoryError: If there is no memory for two buffers: one for the user, and one to fill.
    """
    available = find_available_bytes()
    num_buffers = int(available * SHARE) // max(num_bytes, 1)
    if num_buffers < 2 and 2 * num_bytes > available:
        raise MemoryError(
            f"two batches of {format_bytes(num_bytes)} do not fit into the {format_bytes(available)} of available "
            "memory: use a smaller batch_size, return smaller samples, or give the container more memory "
            "(docker run --memory)"
        )
    return max(min(num_buffers, num_wanted), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferWatch:
    """A subscription of a loader's wrapper, such as a DevicePrefetcher, to the buffers of the wrapper's epochs.

    Attributes:
        callback: Receives each buffer's memory once, as uint8 [n]. The memory lives as long as any view of it.
        num_held: The number of batches that the wrapper holds, in addition to the user's.
        takes_tiles: Whether the wrapper decodes images: if so, the batches hold TiledImages where that is possible.
        thread_id: The thread that begins the wrapper's epochs. Other threads may use the loader at the same time.
    """

    callback: MemoryCallback
    num_held: int
    takes_tiles: bool = False
    thread_id: int = 0


class _ColumnRef(weakref.ref["NDArray[Any]"]):
    """A weak reference to a column that the user holds. When the column is freed, C code puts it into a queue."""

    __slots__ = ("buffer_id",)
    buffer_id: int


class Buffer:
    """Memory for a batch in the training process.

    Attributes:
        buffer_id: The buffer's number, which is never reused.
        layout: The layout of a batch in the buffer.
        is_retired: Whether the buffer must not be filled again.
    """

    def __init__(self, buffer_id: int, layout: Layout, memory: NDArray[np.uint8]) -> None:
        self.buffer_id = buffer_id
        self.layout = layout
        self.is_retired = False
        self._memory = memory
        self._columns: list[_ColumnRef] = []

    def hand_out(self, freed: SimpleQueue[_ColumnRef], spans: Spans | None) -> Views:
        """Return views of the columns or pieces.

        When all views of a column or piece are freed, its reference is put into ``freed``. A tensor's storage holds
        the array that it was made from, so the array lives as long as any view of it.
        """
        if spans is None:
            views = self.layout.views(self._memory)
        else:
            views = {index: self._memory[start:stop] for index, (start, stop) in spans.items()}
        for view in views.values():
            column = _ColumnRef(view, freed.put)
            column.buffer_id = self.buffer_id
            self._columns.append(column)
        return views

    def release(self, column: _ColumnRef) -> bool:
        """Remove a freed column; return whether it was the last one."""
        self._columns.remove(column)
        return not self._columns


class BufferPool:
    """The buffers of one loader, in the process that created it. Call :meth:`lay_out` before :meth:`take`.

    Args:
        announce: Called with a new buffer's id, layout and descriptor before its first use.
        forget: Called with the ids of buffers that are never filled again.

    Attributes:
        layout: The layout of a batch in a buffer; None before :meth:`lay_out`.
    """

    def __init__(self, announce: Callable[[int, Layout, int], None], forget: Callable[[tuple[int, ...]], None]) -> None:
        self.layout: Layout | None = None
        self._num_spare = 0
        self._announce, self._forget = announce, forget
        self._watches: tuple[BufferWatch, ...] = ()
        self._freed: SimpleQueue[_ColumnRef] = SimpleQueue()
        self._free: list[Buffer] = []
        self._taken: dict[int, Buffer] = {}
        self._held: dict[int, Buffer] = {}
        self._num_made = 0
        # A forked child shares the pages of the batches that the user holds, so those pages must not change. Retire the
        # buffers before and after the fork: another thread may receive a batch in between, and the child also holds it.
        call_at_fork(self, before=BufferPool.retire_held, after_in_parent=BufferPool.retire_held)

    def watch(self, watches: Sequence[BufferWatch]) -> None:
        """From now on, fill only buffers that these watches have received.

        A watch may change the memory of a buffer, for example by registering it with CUDA. Such a change must not
        affect an epoch that the wrapper did not begin.
        """
        if tuple(watches) != self._watches:
            self.retire()
            self._watches = tuple(watches)

    def lay_out(self, layout: Layout, num_spare: int) -> None:
        """Use buffers of this layout from now on.

        Args:
            layout: The layout of a batch in a buffer.
            num_spare: The number of free buffers to keep, in addition to those for the watches. The pool drops other
                free buffers, which it created while the user kept batches.
        """
        self.layout, self._num_spare = layout, num_spare
        self._drop_free()

    def take(self) -> Buffer:
        """Return a buffer to fill. The layout must have columns."""
        self.collect()
        buffer = self._free.pop() if self._free else self._make()
        self._taken[buffer.buffer_id] = buffer
        return buffer

    def hand_out(self, buffer: Buffer, spans: Spans | None = None) -> Views:
        """Return a filled buffer's columns. When all columns are freed, the buffer returns to the pool.

        Args:
            buffer: The buffer.
            spans: The spans of the pieces, at least one, to return instead of columns.
        """
        self._held[buffer.buffer_id] = self._taken.pop(buffer.buffer_id)
        return buffer.hand_out(self._freed, spans)

    def put_back(self, buffers: Iterable[Buffer]) -> None:
        """Take back buffers whose content is no longer needed. Workers must no longer be filling them."""
        superfluous, num_spare = [], self._num_spare + sum(watch.num_held for watch in self._watches)
        for buffer in buffers:
            self._taken.pop(buffer.buffer_id, None)
            if buffer.is_retired or buffer.layout is not self.layout or len(self._free) >= num_spare:
                superfluous.append(buffer)
            else:
                self._free.append(buffer)
        self.drop(superfluous)

    def drop(self, buffers: Iterable[Buffer]) -> None:
        """Drop buffers, even if a worker is still filling them."""
        buffer_ids = tuple(buffer.buffer_id for buffer in buffers)
        for buffer_id in buffer_ids:
            self._taken.pop(buffer_id, None)
        if buffer_ids:
            self._forget(buffer_ids)

    def retire(self) -> None:
        """Retire all current buffers, for example because a restarted worker process does not have them."""
        for buffer in self._taken.values():
            buffer.is_retired = True
        self.retire_held()
        self._drop_free()

    def retire_held(self) -> None:
        """Retire the buffers that the user holds: they are never filled again."""
        for buffer in list(self._held.values()):
            buffer.is_retired = True

    def collect(self) -> None:
        """Take back the buffers that the user has freed."""
        freed = []
        with suppress(Empty):
            while True:
                column = self._freed.get_nowait()
                if self._held[column.buffer_id].release(column):
                    freed.append(self._held.pop(column.buffer_id))
        self.put_back(freed)

    def close(self) -> None:
        """Release all buffers. Buffers that the user holds are freed with the user's tensors."""
        self._free = []
        self._taken.clear()
        self._held.clear()

    def _drop_free(self) -> None:
        free, self._free = self._free, []
        self.drop(free)

    def _make(self) -> Buffer:
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
        return Buffer(self._num_made - 1, self.layout, memory)


def map_in_torch(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map memory that tensors can view. Use torch, which keeps no descriptor open: users may hold many batches."""
    import torch  # Worker processes may start without torch.

    storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{descriptor}", shared=True, nbytes=num_bytes)
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[arg-type]  # set_() also accepts storages
    return memory.numpy()
