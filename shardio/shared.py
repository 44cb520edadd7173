"""Lists and integers in memory that worker processes share.

Python stores the reference count of each object in the object itself. So worker processes that only read a list of
millions of objects still write to all of the list's memory, and each process gets a copy (pytorch/pytorch#13246). An
array has a single reference count. shardio.DataLoader also shares the memory of arrays with workers that are not
forked.

Small arrays share an arena, so a process holds only two file descriptors per arena: one to pass to spawned worker
processes, and one inside Python's ``mmap``. Forked worker processes inherit the mapping.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from contextlib import contextmanager, suppress
from functools import total_ordering
from itertools import accumulate, chain, pairwise
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from shardio.values import count

T = TypeVar("T")

_BLOCK = 4096
"""The number of values that an iteration unpacks at a time."""

LINE = 64
"""The size of a processor's cache line in bytes. Each array starts on its own cache line, which is never reused."""

ARENA_LINES = 1024
"""The number of cache lines in an arena."""


@total_ordering
class SharedList(MutableSequence[T], Generic[T]):
    """A list of strings, bytes, integers, floats, booleans, or tuples of these.

    All values have the same type, and tuples also have the same length and element types. The list compares equal to a
    plain list of the same values. An integer takes 8 bytes, and a string takes 8 bytes plus the length of its UTF-8
    encoding. After a change, the values are kept in a plain list until the SharedList is pickled.

    >>> samples = SharedList([("a.jpg", 0), ("b.jpg", 1)])
    >>> samples[1], len(samples)
    (('b.jpg', 1), 2)
    >>> samples == [("a.jpg", 0), ("b.jpg", 1)]
    True

    Args:
        values: The values.

    Raises:
        TypeError: If a value has an unsupported type, or a different type from the first value. The message names the
            value.
        OverflowError: If an integer does not fit in 64 bits (signed).
    """

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __init__(self, values: Iterable[T] = ()) -> None:
        self._packed: _Column | None = _pack(values if isinstance(values, list | tuple) else list(values))
        self._values: list[T] = []  # The values after a change; ``_packed`` is then None.

    @classmethod
    def joined(cls, lists: Iterable[SharedList[T]]) -> SharedList[T]:
        """Return the concatenated values of several lists that have not been changed.

        Each list must be empty or have values of the same types as the other lists.
        """
        columns = [each._packed for each in lists if each._packed]
        result = cls()
        if columns:
            result._packed = columns[0].join(columns)
        return result

    def __len__(self) -> int:
        return len(self._values if self._packed is None else self._packed)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        packed = self._packed
        if packed is None:
            return self._values[index]
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return packed.take(start, max(start, stop))
            return [self[each] for each in range(start, stop, step)]
        # Indexing a ``range`` supports negative indices, and raises IndexError if the index is out of range.
        number = range(len(self))[index]
        value: T = packed.take(number, number + 1)[0]
        return value

    def __iter__(self) -> Iterator[T]:
        starts = range(0, len(self), _BLOCK)
        return chain.from_iterable(self[start : start + _BLOCK] for start in starts)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._unpack()[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self._unpack()[index]

    def insert(self, index: int, value: T) -> None:
        """Insert a value before an index."""
        self._unpack().insert(index, value)

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """Sort the values in place, as ``list.sort`` does."""
        self._unpack().sort(key=key, reverse=reverse)

    def copy(self) -> SharedList[T]:
        """Return a copy, as ``list.copy`` does."""
        other: SharedList[T] = SharedList()
        other._packed, other._values = self._packed, self._values.copy()
        return other

    __copy__ = copy

    def __lt__(self, other: object) -> bool:
        return list(self) < list(other) if isinstance(other, list | SharedList) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | SharedList):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    def __add__(self, other: Iterable[T]) -> list[T]:
        return [*self, *other]

    def __radd__(self, other: Iterable[T]) -> list[T]:
        return [*other, *self]

    def __mul__(self, number: int) -> list[T]:
        return list(self) * number

    __rmul__ = __mul__

    def __repr__(self) -> str:
        first = ", ".join(map(repr, self[:3]))
        return f"SharedList([{first}{', …' if len(self) > 3 else ''}], {count(len(self), 'value')})"

    def __getstate__(self) -> dict[str, Any]:
        if self._packed is None:
            with suppress(TypeError, OverflowError):  # After a change, the values might not fit into arrays.
                return {"_packed": _pack(self._values), "_values": []}
        return self.__dict__

    def _unpack(self) -> list[T]:
        if self._packed is not None:
            self._values, self._packed = self._packed.take(0, len(self._packed)), None
        return self._values


class _Column(Protocol):
    def __len__(self) -> int: ...

    def take(self, start: int, stop: int) -> list[Any]:
        """Return the values from ``start`` to ``stop``."""

    def join(self, columns: list[Any]) -> _Column:
        """Return the values of several columns of the same kind, including this column."""


class _Numbers:
    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def take(self, start: int, stop: int) -> list[Any]:
        values: list[Any] = self._array[start:stop].tolist()
        return values

    def join(self, columns: list[_Numbers]) -> _Numbers:
        return _Numbers(np.concatenate([column._array for column in columns]))


class _Texts:
    def __init__(self, values: Sequence[Any], *, is_text: bool) -> None:
        self._is_text = is_text
        joined = _encode("".join(values)) if is_text else b"".join(values)
        lengths: Iterable[int] = map(len, values)
        if is_text and len(joined) != sum(map(len, values)):  # Not only ASCII characters.
            lengths = (len(_encode(value)) for value in values)
        self._content = np.frombuffer(joined, np.uint8)
        self._stops = np.fromiter(accumulate(lengths, initial=0), np.int64, len(values) + 1)

    def __len__(self) -> int:
        return len(self._stops) - 1

    def take(self, start: int, stop: int) -> list[Any]:
        stops = self._stops[start : stop + 1].tolist()
        first = stops[0]
        content = self._content[first : stops[-1]].tobytes()
        pieces = [content[one - first : other - first] for one, other in pairwise(stops)]
        return [piece.decode("utf-8", "surrogatepass") for piece in pieces] if self._is_text else pieces

    def join(self, columns: list[_Texts]) -> _Texts:
        result = _Texts((), is_text=self._is_text)
        firsts = accumulate((column._stops[-1] for column in columns), initial=0)
        stops = [column._stops[1:] + first for column, first in zip(columns, firsts, strict=False)]
        result._content = np.concatenate([column._content for column in columns])
        result._stops = np.concatenate([[0], *stops])
        return result


class _Tuples:
    def __init__(self, columns: list[_Column], num_values: int) -> None:
        self._columns, self._num_values = columns, num_values

    def __len__(self) -> int:
        return self._num_values

    def take(self, start: int, stop: int) -> list[Any]:
        if not self._columns:
            return [()] * (stop - start)
        return list(zip(*(column.take(start, stop) for column in self._columns), strict=True))

    def join(self, columns: list[_Tuples]) -> _Tuples:
        joined = [column.join([each._columns[index] for each in columns]) for index, column in enumerate(self._columns)]
        return _Tuples(joined, sum(map(len, columns)))


def _pack(values: Sequence[Any], where: str = "") -> _Column:
    kind = type(values[0]) if values else int
    if len(set(map(type, values))) > 1:
        index, other = next((index, value) for index, value in enumerate(values) if type(value) is not kind)
        raise TypeError(
            f"a SharedList holds values of one type, but{where} value 0 is of type {kind.__name__} and value {index} "
            f"of type {type(other).__name__}: convert them, or use a list"
        )
    if kind is tuple:
        return _pack_tuples(values, where)
    if kind in (str, bytes):
        return _Texts(values, is_text=kind is str)
    if kind in (int, float, bool):
        return _Numbers(np.array(values, {int: np.int64, float: np.float64, bool: np.bool_}[kind]))
    raise TypeError(
        f"a SharedList holds str, bytes, int, float, bool and tuples of these, but{where} value 0 is of type "
        f"{kind.__name__}: convert the values, or use a list"
    )


def _pack_tuples(values: Sequence[tuple[Any, ...]], where: str) -> _Column:
    length = len(values[0])
    if len(set(map(len, values))) > 1:
        index = next(index for index, value in enumerate(values) if len(value) != length)
        raise TypeError(
            f"a SharedList holds tuples of one length, but{where} value 0 has {length} elements and value {index} has "
            f"{len(values[index])}: convert them, or use a list"
        )
    # Pack one column at a time, because zip(*values) would pass millions of arguments.
    columns = [_pack(list(map(itemgetter(index), values)), f"{where} in element {index},") for index in range(length)]
    return _Tuples(columns, len(values))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # Paths may hold bytes that are not UTF-8.


class SharedNumbers:
    """A few integers in memory that forked and spawned worker processes share.

    Copies that are pickled for any other purpose have their own memory.

    Args:
        values: The initial integers.

    Attributes:
        array: int64 [n], the integers. Changes are visible to all processes that share the memory.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self._attach(*_allocate(len(values)), len(values))
        self.array[:] = values

    def _attach(self, arena: _Arena, line: int, size: int) -> None:
        self._arena, self._line = arena, line
        self.array: NDArray[np.int64] = np.frombuffer(arena.memory, np.int64, size, line * LINE)

    @property
    def values(self) -> tuple[int, ...]:
        """The integers as last set by any process."""
        return tuple(self.array.tolist())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock that keeps other processes out of their ``locked`` blocks."""
        # The lock belongs only to this process: a forked child does not inherit it.
        fcntl.lockf(self._arena.descriptor, fcntl.LOCK_EX, LINE, self._line * LINE)
        try:
            yield
        finally:
            fcntl.lockf(self._arena.descriptor, fcntl.LOCK_UN, LINE, self._line * LINE)

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None:
            return SharedNumbers, (self.values,)
        return _attach, (self._arena, self._line, len(self.array))


def _attach(*place: Any) -> SharedNumbers:
    numbers = SharedNumbers.__new__(SharedNumbers)
    numbers._attach(*place)
    return numbers


class _Arena:
    def __init__(self, descriptor: int, num_lines: int) -> None:
        self.lines = iter(range(num_lines))  # Taking the next line is atomic.
        self.process_id = os.getpid()
        self.memory = mmap.mmap(descriptor, num_lines * LINE)
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    def __reduce__(self) -> Any:
        return _open_arena, (reduction.DupFd(self.descriptor), len(self.memory) // LINE)


_arena: _Arena | None = None
"""The arena for this process's next arrays, created with the first array. Forked children do not allocate from it."""


def _allocate(size: int) -> tuple[_Arena, int]:
    global _arena
    if 8 * size > LINE:
        return _make_arena(-(-8 * size // LINE)), 0
    while True:
        arena = _arena
        if arena is not None and arena.process_id == os.getpid() and (line := next(arena.lines, None)) is not None:
            return arena, line
        _arena = _make_arena(ARENA_LINES)


def _make_arena(num_lines: int) -> _Arena:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("shared-numbers", os.MFD_CLOEXEC)
    else:  # On macOS, use an unlinked file.
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)  # noqa: PTH108  # It is a string.
    try:
        os.ftruncate(descriptor, num_lines * LINE)
        return _Arena(descriptor, num_lines)
    except BaseException:  # Even Ctrl-C must not leave the descriptor open.
        os.close(descriptor)
        raise


def _open_arena(descriptor: Any, num_lines: int) -> _Arena:
    return _Arena(descriptor.detach(), num_lines)
