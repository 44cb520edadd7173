"""Integers in memory that processes share. On Linux it is anonymous: it has no name, and needs no /dev/shm.

Small arrays share an arena, so that a process holds two descriptors for all of them: the arena's, by which worker
processes that are spawned get it, and that of Python's mapping. Forked ones inherit the mapping.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LINE = 64
"""Bytes of a processor's cache line. Each array begins on a line of its own, which is never used again."""

ARENA_LINES = 1024


class SharedNumbers:
    """An array that is shared with worker processes, however they are started. Any other copy has its own memory.

    Args:
        values: The integers at first.

    Attributes:
        array: int64 [n], the integers. What one process writes, the others read.
    """

    def __init__(self, values: Sequence[int]) -> None:
        if hasattr(os, "memfd_create"):
            place = _allocate(len(values))
            self._memory: _Place | torch.Tensor = place
            self.array = place.view()
        else:
            tensor = torch.zeros(len(values), dtype=torch.int64, device="cpu").share_memory_()
            self._memory = tensor
            self.array = tensor.numpy()
        self.array[:] = values

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of such a block of theirs. Where the memory is not anonymous, nobody is kept out."""
        if isinstance(self._memory, _Place):
            with self._memory.locked():
                yield
        else:
            yield

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            return SharedNumbers, (self.array.tolist(),)
        return _attach, (self._memory,)


class _Arena:
    """Anonymous memory for arrays, and how many of its lines are taken."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_lines = num_bytes // LINE
        self.lines = itertools.count()  # Taking the next one is atomic.
        self.process_id = os.getpid()
        self.memory = mmap.mmap(descriptor, num_bytes)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @contextmanager
    def locked(self, line: int) -> Iterator[None]:
        """Hold a lock on one line. It belongs to this process alone, also after a fork, and ends with the process."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, LINE, line * LINE)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, LINE, line * LINE)

    def __reduce__(self) -> Any:
        return _open_arena, (reduction.DupFd(self._descriptor), self.num_lines * LINE)


class _Place:
    """Where an array of ``size`` integers lies."""

    def __init__(self, arena: _Arena, line: int, size: int) -> None:
        self._arena, self._line, self._size = arena, line, size

    def view(self) -> NDArray[np.int64]:
        return np.frombuffer(self._arena.memory, np.int64, self._size, self._line * LINE)

    def locked(self) -> AbstractContextManager[None]:
        return self._arena.locked(self._line)


_arena: _Arena | None = None
"""Where this process puts the next arrays: made with the first one, and left alone by forked children."""


def _allocate(size: int) -> _Place:
    global _arena
    if 8 * size > LINE:
        return _Place(_make_arena(-(-8 * size // LINE)), 0, size)
    while True:
        arena = _arena
        if arena is not None and arena.process_id == os.getpid() and (line := next(arena.lines)) < arena.num_lines:
            return _Place(arena, line, size)
        _arena = _make_arena(ARENA_LINES)


def _make_arena(num_lines: int) -> _Arena:
    descriptor = os.memfd_create("shared-numbers", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_lines * LINE)
        return _Arena(descriptor, num_lines * LINE)
    except BaseException:  # Ctrl-C as well must not leave it open.
        os.close(descriptor)
        raise


def _open_arena(descriptor: Any, num_bytes: int) -> _Arena:
    return _Arena(descriptor.detach(), num_bytes)


def _attach(memory: _Place | torch.Tensor) -> SharedNumbers:
    numbers = SharedNumbers.__new__(SharedNumbers)
    numbers._memory = memory
    numbers.array = memory.numpy() if isinstance(memory, torch.Tensor) else memory.view()
    return numbers
