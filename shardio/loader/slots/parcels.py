"""Values of any structure between processes: a pickle with gaps, and the memory of the tensors that fill them.

The memory is in a slot, in memory made for this value alone or, if it is small, beside the pickle. Tensors keep their
strides, and tensors that share memory still share it. Values other than dense CPU tensors and arrays are pickled as
torch's queues pickle them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

MIN_BYTES = 4096
"""Smaller pieces of memory travel beside the pickle, so that keeping them does not keep a slot."""

ALIGNMENT = 64
"""Where pieces begin in a slot, in bytes: a multiple of the size of a cache line, and of every dtype."""

Memory = NDArray[np.uint8]


@dataclass(kw_only=True, eq=False)
class Piece:
    """A piece of memory: the bytes of a storage from the first to the last one that the tensors of a value use.

    Attributes:
        start: The first byte, counted from the beginning of the storage.
        content: The bytes, if they travel in the parcel.
        span: Otherwise, where they are in the slot: the first byte, and the one after the last.
    """

    start: int
    content: bytes | None = None
    span: tuple[int, int] = (0, 0)


@dataclass(kw_only=True, eq=False)
class Parcel:
    """A value without its memory.

    Attributes:
        content: The pickle.
        pieces: Its memory.
        num_bytes: How many bytes of a slot the pieces need.
        is_in_slot: Whether they are in the slot that was given; otherwise they are in memory of their own.
    """

    content: bytes
    pieces: list[Piece]
    num_bytes: int
    is_in_slot: bool


class Arena:
    """The memory of a slot, which is given out piece by piece.

    Args:
        memory: uint8 [n].
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._stop = 0

    def take(self, num_bytes: int) -> Memory | None:
        """Return a piece that was not given out before; None if there is not enough left."""
        start = _align(self._stop)
        if start + num_bytes > len(self.memory):
            return None
        self._stop = start + num_bytes
        return self.memory[start : self._stop]

    def find(self, piece: Memory) -> tuple[int, int] | None:
        """Return where in this memory a piece is: its first byte, and the one after its last; None if elsewhere."""
        start: int = piece.ctypes.data - self.memory.ctypes.data
        return (start, start + len(piece)) if 0 <= start <= len(self.memory) - len(piece) else None


class _Gap(NamedTuple):
    """The place of a tensor or an array.

    Attributes:
        piece_index: Its piece.
        dtype: The name of torch's dtype, or numpy's for arrays.
        is_array: Whether it is an array.
        offset: Its first byte, counted from the beginning of the storage.
        shape: Its shape.
        strides: Its strides, in items for a tensor and in bytes for an array.
    """

    piece_index: int
    dtype: str
    is_array: bool
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def pack(value: Any, arena: Arena | None, make_memory: Callable[[int], Memory]) -> Parcel:
    """Return a value as a parcel.

    Args:
        value: Any value that torch's queues can send.
        arena: A slot for its memory; what is there already is not copied. None if there is no slot.
        make_memory: Returns memory of n bytes, for what does not fit into the arena.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    pieces, large = list[Piece](), list[tuple[Piece, Memory]]()
    for storage in packer.storages.values():
        memory = storage.read()
        piece = Piece(start=storage.start)
        pieces.append(piece)
        if len(memory) < MIN_BYTES:
            piece.content = memory.tobytes()
        else:
            large.append((piece, memory))
    num_bytes = sum(_align(len(memory)) for _, memory in large)
    is_in_slot = arena is not None and _place(large, arena)
    if large and not is_in_slot:
        _place(large, Arena(make_memory(num_bytes)))
    return Parcel(content=file.getvalue(), pieces=pieces, num_bytes=num_bytes, is_in_slot=is_in_slot)


def unpack(parcel: Parcel, memories: Sequence[Memory | None]) -> Any:
    """Return the value.

    Args:
        parcel: The value without its memory.
        memories: The memory of each piece, uint8 [n]; None for pieces that travelled in the parcel.
    """
    filled = [
        memory if piece.content is None else np.array(memoryview(piece.content), np.uint8)
        for piece, memory in zip(parcel.pieces, memories, strict=True)
    ]
    return _Unpacker(parcel, filled).load()


def _place(pieces: Sequence[tuple[Piece, Memory]], arena: Arena) -> bool:
    """Copy pieces into an arena, unless they are there; return whether they fit."""
    for piece, memory in pieces:
        if (span := arena.find(memory)) is None:
            taken = arena.take(len(memory))
            if taken is None:
                return False
            taken[...] = memory
            span = arena.find(taken)
            assert span is not None, "it was taken from there"
        piece.span = span
    return True


class _Storage:
    """The bytes of a storage, or of an array, that a value uses."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.start, self._stop = len(memory), 0

    def cover(self, start: int, stop: int) -> None:
        """Include some bytes. A piece begins where any dtype may begin."""
        self.start, self._stop = min(self.start, start // ALIGNMENT * ALIGNMENT), max(self._stop, stop)

    def read(self) -> Memory:
        """Return the bytes that are used."""
        return self._memory[self.start : max(self._stop, self.start)]


class _Packer(ForkingPickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.storages: dict[int, _Storage] = {}  # By the address of their memory, or by the id of an array.
        self._indices: dict[int, int] = {}
        self._kept: list[Any] = []  # So that no other object gets the id or the address of an earlier one.

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value. It is not called for numbers, strings and containers, as persistent ids are."""
        gap = None
        if type(value) is torch.Tensor:
            gap = self._pack_tensor(value)
        elif type(value) is np.ndarray:
            gap = self._pack_array(value)
        return NotImplemented if gap is None else (_fill, gap)

    def _pack_tensor(self, tensor: torch.Tensor) -> _Gap | None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
            return None
        if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or vars(tensor):
            return None
        storage, size = tensor.untyped_storage(), tensor.element_size()
        start = int(tensor.storage_offset()) * size
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = int(reach) + 1 if tensor.numel() else 0
        index = self._add(storage.data_ptr(), storage, start, start + extent * size)
        return _Gap(
            piece_index=index,
            dtype=str(tensor.dtype).removeprefix("torch."),
            is_array=False,
            offset=start,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
        )

    def _pack_array(self, array: NDArray[Any]) -> _Gap | None:
        if array.nbytes < MIN_BYTES or array.dtype.kind not in "biufc" or not array.dtype.isnative:
            return None
        is_transposed = array.flags.f_contiguous and not array.flags.c_contiguous
        ordered = np.ascontiguousarray(array.T if is_transposed else array)
        index = self._add(id(array), ordered, 0, array.nbytes)
        self._kept.append(array)
        return _Gap(
            piece_index=index,
            dtype=array.dtype.str,
            is_array=True,
            offset=0,
            shape=array.shape,
            strides=(array if is_transposed else ordered).strides,
        )

    def _add(self, key: int, owner: Any, start: int, stop: int) -> int:
        if key not in self.storages:
            memory = owner.reshape(-1).view(np.uint8) if isinstance(owner, np.ndarray) else _as_bytes(owner)
            self.storages[key] = _Storage(memory)
            self._indices[key] = len(self._indices)
            self._kept.append(owner)
        self.storages[key].cover(start, stop)
        return self._indices[key]


class _Unpacker(pickle.Unpickler):
    def __init__(self, parcel: Parcel, memories: Sequence[Memory | None]) -> None:
        super().__init__(io.BytesIO(parcel.content))
        self._parcel, self._memories = parcel, memories
        self._tensors: dict[int, torch.Tensor] = {}  # By piece: tensors that shared a storage share one again.

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for: instead of :func:`_fill`, the method that has the memory."""
        return self._fill if (module, name) == (__name__, _fill.__name__) else super().find_class(module, name)

    def _fill(self, *values: Any) -> Any:
        """Return the tensor or array of a gap."""
        gap = _Gap(*values)
        memory = self._memories[gap.piece_index]
        assert memory is not None, "every piece has memory"
        if gap.is_array:
            # A copy, because slices of an array hold a slot's memory, but not the array that the pool watches.
            ordered = memory.view(gap.dtype)
            return np.lib.stride_tricks.as_strided(ordered, gap.shape, gap.strides).copy(order="K")
        if gap.piece_index not in self._tensors:
            self._tensors[gap.piece_index] = torch.from_numpy(memory)
        dtype = getattr(torch, gap.dtype)
        piece = self._tensors[gap.piece_index]
        size = dtype.itemsize
        items = piece[: len(piece) // size * size].view(dtype) if len(piece) else torch.empty(0, dtype=dtype)
        return items.as_strided(
            gap.shape, gap.strides, (gap.offset - self._parcel.pieces[gap.piece_index].start) // size
        )


def _fill(*values: Any) -> Any:
    """Stand for :meth:`_Unpacker._fill` in pickles."""
    raise RuntimeError("only unpack can read this pickle")


def _as_bytes(storage: torch.UntypedStorage) -> Memory:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
