"""Integers in shared memory. On Linux, the memory is anonymous: it has no name and does not use /dev/shm.

Small arrays share an arena, so a process holds only two file descriptors per arena: one to pass to spawned worker
processes, and one inside Python's ``mmap``. Forked worker processes inherit the mapping.
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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

LINE = 64
"""The size of a processor's cache line in bytes. Each array starts on its own line, which is never reused."""

ARENA_LINES = 1024
"""The number of cache lines in an arena."""


class SharedNumbers:
    """An array that is shared with worker processes, whether forked or spawned. Any other copy has its own memory.

    Args:
        values: The initial integers.

    Attributes:
        array: int64 [n], the integers. Changes are visible to all processes that share the array.
    """

    def __init__(self, values: Sequence[int]) -> None:
        if hasattr(os, "memfd_create"):
            span = _allocate(len(values))
            self._memory: _Span | torch.Tensor = span
            self.array = span.view()
        else:
            import torch

            tensor = torch.zeros(len(values), dtype=torch.int64, device="cpu").share_memory_()
            self._memory = tensor
            self.array = tensor.numpy()
        self.array[:] = values

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out of their own ``locked`` blocks. Without anonymous memory, this does nothing."""
        if isinstance(self._memory, _Span):
            with self._memory.locked():
                yield
        else:
            yield

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            return SharedNumbers, (self.array.tolist(),)
        return _attach, (self._memory,)


class SharedCell:
    """A few integers in shared memory. Workers that hold a copy of the cell also see later changes."""

    def __init__(self, *values: int) -> None:
        self._numbers = SharedNumbers(values)

    @property
    def values(self) -> tuple[int, ...]:
        """The integers as last set by any process."""
        return tuple(self._numbers.array.tolist())

    def set(self, *values: int) -> None:
        """Set the integers for all processes that share the cell."""
        self._numbers.array[:] = values

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCell:
        return SharedCell(*self.values)


class SharedCount:
    """A count that several workers increment. Increments are not atomic, so each worker has its own element.

    Args:
        num_workers: The number of workers; a training process without workers counts as one.
    """

    def __init__(self, num_workers: int) -> None:
        self._numbers = SharedNumbers([0] * max(num_workers, 1))

    @property
    def total(self) -> int:
        """The sum over all workers."""
        return int(self._numbers.array.sum())

    def add_one(self, worker_id: int) -> None:
        """Add one to a worker's count."""
        self._numbers.array[worker_id % len(self._numbers.array)] += 1

    def clear(self) -> None:
        """Reset the count to 0."""
        self._numbers.array[:] = 0


class _Arena:
    """Anonymous memory for arrays, and the number of its lines that are in use."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.num_lines = num_bytes // LINE
        self.lines = itertools.count()  # Taking the next one is atomic.
        self.process_id = os.getpid()
        self.memory = mmap.mmap(descriptor, num_bytes)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @contextmanager
    def locked(self, line: int) -> Iterator[None]:
        """Lock one line. The lock belongs to this process alone: a forked child does not inherit it."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, LINE, line * LINE)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, LINE, line * LINE)

    def __reduce__(self) -> Any:
        return _open_arena, (reduction.DupFd(self._descriptor), self.num_lines * LINE)


class _Span:
    """The part of an arena that holds an array of ``size`` integers."""

    def __init__(self, arena: _Arena, line: int, size: int) -> None:
        self._arena, self._line, self._size = arena, line, size

    def view(self) -> NDArray[np.int64]:
        return np.frombuffer(self._arena.memory, np.int64, self._size, self._line * LINE)

    def locked(self) -> AbstractContextManager[None]:
        return self._arena.locked(self._line)


_arena: _Arena | None = None
"""The arena for this process's next arrays, created with the first one. Forked children do not allocate from it."""


def _allocate(size: int) -> _Span:
    global _arena
    if 8 * size > LINE:
        return _Span(_make_arena(-(-8 * size // LINE)), 0, size)
    while True:
        arena = _arena
        if arena is not None and arena.process_id == os.getpid() and (line := next(arena.lines)) < arena.num_lines:
            return _Span(arena, line, size)
        _arena = _make_arena(ARENA_LINES)


def _make_arena(num_lines: int) -> _Arena:
    descriptor = os.memfd_create("shared-numbers", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, num_lines * LINE)
        return _Arena(descriptor, num_lines * LINE)
    except BaseException:  # Ctrl-C must not leave the descriptor open either.
        os.close(descriptor)
        raise


def _open_arena(descriptor: Any, num_bytes: int) -> _Arena:
    return _Arena(descriptor.detach(), num_bytes)


def _attach(memory: _Span | torch.Tensor) -> SharedNumbers:
    numbers = SharedNumbers.__new__(SharedNumbers)
    numbers._memory = memory
    numbers.array = memory.view() if isinstance(memory, _Span) else memory.numpy()
    return numbers
