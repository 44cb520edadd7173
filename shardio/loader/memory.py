"""Anonymous shared memory, and how a batch lies in it."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 4096
"""Each array begins on a page of its own."""


def make_memory(num_bytes: int) -> int:
    """Return the descriptor of new anonymous memory, which is freed when nobody has it open or mapped any more."""
    descriptor = os.memfd_create("shardio", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_bytes)
    except BaseException:  # Ctrl-C as well must not leave it open.
        os.close(descriptor)
        raise
    return descriptor


def map_memory(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map memory for reading and writing; it is unmapped when the array and its views are gone.

    Python's own mmap would keep a duplicate of the descriptor for each mapping.

    Raises:
        OSError: If the system refuses.
    """
    address = _libc().mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: a slot of {num_bytes} bytes cannot be mapped")
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
    """How the columns of fixed size of a batch lie in a slot.

    Attributes:
        num_rows: The samples of a full batch.
        columns: For each such column, by its place among the fields: dtype and shape of an item.
    """

    num_rows: int
    columns: Mapping[int, tuple[str, tuple[int, ...]]]

    @cached_property
    def offsets(self) -> dict[int, int]:
        """Where each column begins, and under -1 where the last one ends."""
        offsets, stop = {}, 0
        for place, (dtype, shape) in self.columns.items():
            offsets[place] = stop
            stop += -(-self.num_rows * np.dtype(dtype).itemsize * prod(shape) // ALIGNMENT) * ALIGNMENT
        return {**offsets, -1: stop}

    @property
    def num_bytes(self) -> int:
        """The size of a slot."""
        return self.offsets[-1]

    def view(self, memory: NDArray[np.uint8], place: int) -> NDArray[np.generic]:
        """Return a column, [num_rows, *shape], in uint8 [num_bytes]."""
        dtype, shape = self.columns[place]
        start = self.offsets[place]
        num_bytes = self.num_rows * np.dtype(dtype).itemsize * prod(shape)
        return memory[start : start + num_bytes].view(dtype).reshape(self.num_rows, *shape)

    def views(self, memory: NDArray[np.uint8]) -> dict[int, NDArray[np.generic]]:
        """Return all columns by place."""
        return {place: self.view(memory, place) for place in self.columns}
