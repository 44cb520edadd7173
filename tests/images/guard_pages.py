"""Memory directly beside pages that nobody may touch: whoever reads or writes one byte too many ends the process."""

from __future__ import annotations

import ctypes
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
    """Memory for one array at a time, between two pages that nobody may touch.

    An array lies against one of them, so what goes beyond the other end is seen only behind the rest of a page:
    place it now at the end, now at the start.
    """

    def __init__(self) -> None:
        self._size = -PAGE  # The first array needs a mapping, however small it is.

    def place(
        self, shape: int | tuple[int, ...], dtype: DTypeLike = np.uint8, *, at_end: bool, content: Any = None
    ) -> NDArray[Any]:
        """Return an array directly before the page behind it, or directly behind the one before it.

        Args:
            shape: Its shape.
            dtype: What it consists of.
            at_end: Whether it lies at the end.
            content: What it holds; nobody may write to it then. Else it holds what was there before.
        """
        kind = np.dtype(dtype)
        num_bytes = kind.itemsize * int(np.prod(shape))
        if num_bytes > self._size:
            self._map(num_bytes)
        self._protect(WRITE)
        start = PAGE + (self._size - num_bytes if at_end else 0)
        array = np.ndarray(shape, kind, self._mapping, start)
        if content is not None:
            array[...] = content
            self._protect(READ)
        return array

    def forbid(self, start: int, stop: int) -> None:
        """Let nobody touch the pages that lie wholly in [start, stop) of the memory that arrays can have."""
        first, behind = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
        if first < behind:
            protect(self._address + PAGE + first, behind - first, NONE)

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
    """Say what may be done with whole pages."""
    if _mprotect(address, num_bytes, access):
        raise OSError(ctypes.get_errno(), "mprotect")
