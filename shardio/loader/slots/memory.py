"""Anonymous shared memory, and the layout of a batch in it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIN_BYTES = 4096
"""Smaller pieces of memory, except images, are not stored in slots, so that keeping them does not keep a slot."""

ALIGNMENT = 4096
"""Each array begins on its own page."""

Column = list[Any] | NDArray[np.generic] | None
"""The values of one field; None if they are in a slot."""


def make_memory(num_bytes: int) -> int:
    """Return the descriptor of new anonymous memory, which is freed when no process has it open or mapped."""
    descriptor = os.memfd_create("shardio", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:  # Ctrl-C must not leave it open either.
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int, num_bytes: int, *, is_private: bool = False) -> NDArray[np.uint8]:
    """Map memory for reading and writing, until the array and its views are freed.

    Python's own mmap would keep a duplicate of the descriptor for each mapping.

    Args:
        descriptor: The memory.
        num_bytes: Its size.
        is_private: Whether this process gets a copy of each page that it writes to.

    Raises:
        OSError: If the operating system cannot map it.
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
    """The layout of a batch's fixed-size columns in a slot.

    Attributes:
        num_rows: The number of samples in a full batch.
        columns: The dtype and shape of an item of each such column, by field index. If there are no such columns,
            batches have no slot.
    """

    num_rows: int
    columns: Mapping[int, tuple[str, tuple[int, ...]]]

    @cached_property
    def offsets(self) -> dict[int, int]:
        """The byte at which each column begins and, under -1, the end of the last one."""
        offsets, stop = {}, 0
        for column_index, (dtype, shape) in self.columns.items():
            offsets[column_index] = stop
            stop += -(-self.num_rows * np.dtype(dtype).itemsize * prod(shape) // ALIGNMENT) * ALIGNMENT
        return {**offsets, -1: stop}

    @property
    def num_bytes(self) -> int:
        """The size of a slot."""
        return self.offsets[-1]

    def view(self, memory: NDArray[np.uint8], column_index: int) -> NDArray[np.generic]:
        """Return a column, [num_rows, *shape], of a slot's memory, uint8 [num_bytes]."""
        dtype, shape = self.columns[column_index]
        start = self.offsets[column_index]
        num_bytes = self.num_rows * np.dtype(dtype).itemsize * prod(shape)
        return memory[start : start + num_bytes].view(dtype).reshape(self.num_rows, *shape)

    def views(self, memory: NDArray[np.uint8]) -> dict[int, NDArray[np.generic]]:
        """Return all columns by field index."""
        return {column_index: self.view(memory, column_index) for column_index in self.columns}
