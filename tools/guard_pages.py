"""Memory next to inaccessible pages: reading or writing one byte beyond the memory ends the process."""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

NONE, READ, WRITE = 0, 1, 3
"""sys/mman.h: PROT_NONE, PROT_READ, and PROT_READ with PROT_WRITE."""

PAGE = mmap.PAGESIZE
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class GuardedMemory:
    """Memory for one array at a time, between two inaccessible pages.

    An array begins or ends at one of the inaccessible pages. Beyond the array's other end, an access is detected only
    if it leaves the array's pages, so place arrays alternately at the end and at the start.
    """

    def __init__(self) -> None:
        self._size = -PAGE  # Even an empty first array needs a mapping.

    def place(
        self, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, at_end: bool, content: Any = None
    ) -> NDArray[Any]:
        """Return an array that ends or begins at an inaccessible page.

        Args:
            shape: The shape of the array.
            dtype: The type of the elements.
            at_end: Whether the array lies at the end of the memory rather than at its start.
            content: The content of the array, which is then read-only. By default, the content is arbitrary.
        """
        kind = np.dtype(dtype)
        num_bytes = kind.itemsize * int(math.prod(shape) if isinstance(shape, tuple) else shape)
        if num_bytes > self._size:
            self._map(num_bytes)
        self._protect(WRITE)
        start = PAGE + (self._size - num_bytes if at_end else 0)
        array = np.ndarray(shape, kind, self._mapping, start)
        if content is not None:
            array[...] = content
            self._protect(READ)
        return array

    def _protect(self, access: int) -> None:
        protect(self._address + PAGE, self._size, access)

    def _map(self, num_bytes: int) -> None:
        self._size = -(-num_bytes // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, PAGE + self._size + PAGE, flags=flags)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        for page in (self._address, self._address + PAGE + self._size):
            protect(page, PAGE, NONE)


def protect(address: int, num_bytes: int, access: int) -> None:
    """Set the access permissions of whole pages."""
    if _mprotect(address, num_bytes, access):
        raise OSError(ctypes.get_errno(), "mprotect")
