"""Anonymous shared memory, the layout of a batch in it, and the form in which it stores the values of a field."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import holds_images
from shardio.transforms import Ragged

MIN_BYTES = 4096
"""Smaller pieces of memory, except images, are not stored in buffers. Otherwise, keeping one would keep a buffer."""

ALIGNMENT = 4096
"""Each array begins on its own page."""

Column = list[Any] | NDArray[np.generic] | None
"""The values of one field; None if they are in a buffer."""


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
    """The layout of a batch's fixed-size columns in a buffer.

    Attributes:
        num_rows: The number of samples in a full batch.
        columns: The dtype and shape of an item of each such column, by field index. If there are no such columns,
            batches have no buffer.
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
        """The size of a buffer."""
        return self.offsets[-1]

    def view(self, memory: NDArray[np.uint8], column_index: int) -> NDArray[np.generic]:
        """Return a column, [num_rows, *shape], of a buffer's memory, uint8 [num_bytes]."""
        dtype, shape = self.columns[column_index]
        start = self.offsets[column_index]
        num_bytes = self.num_rows * np.dtype(dtype).itemsize * prod(shape)
        return memory[start : start + num_bytes].view(dtype).reshape(self.num_rows, *shape)

    def views(self, memory: NDArray[np.uint8]) -> dict[int, NDArray[np.generic]]:
        """Return all columns by field index."""
        return {column_index: self.view(memory, column_index) for column_index in self.columns}


def as_stored(name: str, value: Any) -> NDArray[Any] | None:
    """Return a value as the array that a buffer can store, without a copy; None if it can store none.

    Args:
        name: The name of the value's field. An image is a uint8 array [height, width, 3], a uint8 tensor [3, height,
            width], or any other result of a transform. Only in fields of images, such tensors become such arrays.
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
            return None  # It has the shape of an image [height, width, 3], but is none.
        elif not is_tensor and value.shape[2] != 3:
            return None  # An image of other channels, which a batch holds as [channels, height, width].
    return value if holds_images(name) or value.nbytes >= MIN_BYTES else None


def is_image(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return whether stored items of this dtype and shape are images [height, width, 3]."""
    return holds_images(name) and dtype == np.uint8 and len(shape) == 3 and shape[2] == 3


def _as_array(tensor: Any) -> NDArray[Any] | None:
    """Return a tensor's memory as an array; None if numpy cannot read it."""
    torch = sys.modules["torch"]
    try:
        array: NDArray[Any] = tensor.as_subclass(torch.Tensor).numpy()
    except (RuntimeError, TypeError):  # It needs a gradient, is on another device or sparse, or numpy lacks its dtype.
        return None
    return array
