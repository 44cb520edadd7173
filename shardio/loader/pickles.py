"""Values of any structure between processes: a pickle, and the memory of its tensors and arrays.

Tensors keep their strides, and tensors that share memory still share it. Values other than dense CPU tensors and arrays
are pickled, with the memory of the storages in them taken out, too.

The memory is in a buffer, in memory made for this value alone or, if it is small, beside the structure.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.storage import TypedStorage

from shardio.loader.memory import MIN_BYTES

ALIGNMENT = 64
"""Where pieces begin in a buffer, in bytes: a multiple of the size of a cache line, and of every dtype."""

Memory = NDArray[np.uint8]


@dataclass(kw_only=True, eq=False)
class Structure:
    """A value without its memory.

    Attributes:
        content: The pickle.
        starts: The first byte of each piece of memory, counted from the beginning of its storage.
    """

    content: bytes
    starts: list[int]


class _Gap(NamedTuple):
    """The place of a tensor, an array or a storage.

    Attributes:
        piece_index: Its piece of memory.
        dtype: The name of torch's dtype, or numpy's for arrays; "" for a storage.
        is_array: Whether it is an array.
        offset: Its first byte, counted from the beginning of the storage.
        shape: Its shape.
        strides: Its strides, in items for a tensor and in bytes for an array.
    """

    piece_index: int
    dtype: str = ""
    is_array: bool = False
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


def take_memory_out(value: Any) -> tuple[Structure, list[Memory]]:
    """Return a value without its memory, and the memory, uint8 [n] each: of a storage, the bytes that are used.

    Raises:
        RuntimeError: If a tensor in it is a part of a graph of gradients, as in torch's queues.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    storages = packer.storages.values()
    structure = Structure(content=file.getvalue(), starts=[storage.start for storage in storages])
    return structure, [storage.read() for storage in storages]


def put_memory_back(structure: Structure, pieces: Sequence[torch.Tensor]) -> Any:
    """Return the value.

    Args:
        structure: The value without its memory.
        pieces: The memory, uint8 [n] each. Its tensors are views of it; its arrays are copies.
    """
    return _Unpacker(structure, pieces).load()


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


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        # By the address and size of their memory, or by the id of an array.
        self.storages: dict[tuple[int, ...], _Storage] = {}
        self._indices: dict[tuple[int, ...], int] = {}
        self._kept: list[Any] = []  # So that no other object gets the id or the address of an earlier one.

    def reducer_override(self, value: Any) -> Any:
        """Return how to pickle a value. It is not called for numbers, strings and containers, as persistent ids are."""
        kind, gap = type(value), None
        if kind is torch.Tensor:
            gap = self._pack_tensor(value)
        elif kind is np.ndarray:
            gap = self._pack_array(value)
        elif kind is TypedStorage:  # Of a tensor that is not plain, such as a Parameter.
            return _make_typed, (value._untyped_storage, value.dtype)  # Its public method warns.
        elif kind is torch.UntypedStorage and value.device.type == "cpu":
            gap = _Gap(piece_index=self._add(_identify(value), value, 0, value.nbytes()))
        return NotImplemented if gap is None else (_fill, gap)

    def _pack_tensor(self, tensor: torch.Tensor) -> _Gap | None:
        if tensor.requires_grad and not tensor.is_leaf:
            raise RuntimeError(
                "a tensor that needs a gradient and is not a leaf cannot be sent to another process: call detach() "
                "in the dataset or collate_fn"
            )
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
            return None
        if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg() or vars(tensor):
            return None
        storage, size = tensor.untyped_storage(), tensor.element_size()
        start = int(tensor.storage_offset()) * size
        reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
        extent = int(reach) + 1 if tensor.numel() else 0
        return _Gap(
            piece_index=self._add(_identify(storage), storage, start, start + extent * size),
            dtype=str(tensor.dtype).removeprefix("torch."),
            offset=start,
            shape=tuple(tensor.shape),
            strides=tensor.stride(),
        )

    def _pack_array(self, array: NDArray[Any]) -> _Gap | None:
        if array.nbytes < MIN_BYTES or array.dtype.kind not in "biufc" or not array.dtype.isnative:
            return None
        is_transposed = array.flags.f_contiguous and not array.flags.c_contiguous
        # Writable, because memory that travels beside the pickle becomes a tensor.
        ordered = np.require(array.T if is_transposed else array, requirements=["C", "W"])
        index = self._add((id(array),), ordered, 0, array.nbytes)
        self._kept.append(array)
        return _Gap(
            piece_index=index,
            dtype=array.dtype.str,
            is_array=True,
            shape=array.shape,
            strides=(array if is_transposed else ordered).strides,
        )

    def _add(self, key: tuple[int, ...], owner: Any, start: int, stop: int) -> int:
        if key not in self.storages:
            memory = owner.reshape(-1).view(np.uint8) if isinstance(owner, np.ndarray) else _as_tensor(owner).numpy()
            self.storages[key] = _Storage(memory)
            self._indices[key] = len(self._indices)
            self._kept.append(owner)
        self.storages[key].cover(start, stop)
        return self._indices[key]


class _Unpacker(pickle.Unpickler):
    def __init__(self, structure: Structure, pieces: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(structure.content))
        # Not a method: the unpickler keeps it, so the memory would stay until Python looks for cycles.
        self._fill = partial(_fill_from, structure.starts, pieces)

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for: instead of :func:`_fill`, what has the memory."""
        return self._fill if (module, name) == (__name__, _fill.__name__) else super().find_class(module, name)


def _fill(*values: Any) -> Any:
    """Stand for :func:`_fill_from` in pickles."""
    raise RuntimeError("only put_memory_back can read this pickle")


def _fill_from(starts: Sequence[int], pieces: Sequence[torch.Tensor], *values: Any) -> Any:
    """Return the tensor, array or storage of a gap."""
    gap = _Gap(*values)
    piece = pieces[gap.piece_index]
    if gap.is_array:
        # A copy, because slices of an array hold a buffer's memory, but not the array that the pool watches.
        ordered = piece.numpy().view(gap.dtype)
        return np.lib.stride_tricks.as_strided(ordered, gap.shape, gap.strides).copy(order="K")
    if not gap.dtype:
        return piece.untyped_storage()
    dtype = getattr(torch, gap.dtype)
    size = dtype.itemsize
    items = piece[: len(piece) // size * size].view(dtype) if len(piece) else torch.empty(0, dtype=dtype)
    return items.as_strided(gap.shape, gap.strides, (gap.offset - starts[gap.piece_index]) // size)


def _make_typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> TypedStorage:
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _identify(storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return what tells a storage from others: storages of arrays that begin at the same address may end elsewhere."""
    return storage.data_ptr(), storage.nbytes()


def _as_tensor(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@dataclass(kw_only=True, eq=False)
class Piece:
    """A piece of memory.

    Attributes:
        content: The bytes, if they travel in the parcel.
        span: Otherwise, where they are in the buffer: the first byte, and the one after the last.
    """

    content: bytes | None = None
    span: tuple[int, int] = (0, 0)


@dataclass(kw_only=True, eq=False)
class Parcel:
    """A value without its large pieces of memory.

    Attributes:
        structure: The value without any.
        pieces: Its memory.
        num_bytes: How many bytes of a buffer the pieces need.
        is_in_buffer: Whether they are in the buffer that was given; otherwise they are in memory of their own.
    """

    structure: Structure
    pieces: list[Piece]
    num_bytes: int
    is_in_buffer: bool


class Arena:
    """The memory of a buffer, which is given out piece by piece.

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


def pack(value: Any, arena: Arena | None, make_memory: Callable[[int], Memory]) -> Parcel:
    """Return a value as a parcel.

    Args:
        value: Any value that can be pickled.
        arena: A buffer for its memory; what is there already is not copied. None if there is no buffer.
        make_memory: Returns memory of n bytes, for what does not fit into the arena.
    """
    structure, memories = take_memory_out(value)
    pieces = [Piece(content=memory.tobytes() if len(memory) < MIN_BYTES else None) for memory in memories]
    large = [(piece, memory) for piece, memory in zip(pieces, memories, strict=True) if piece.content is None]
    num_bytes = sum(_align(len(memory)) for _, memory in large)
    is_in_buffer = arena is not None and _place(large, arena)
    if large and not is_in_buffer:
        _place(large, Arena(make_memory(num_bytes)))
    return Parcel(structure=structure, pieces=pieces, num_bytes=num_bytes, is_in_buffer=is_in_buffer)


def unpack(parcel: Parcel, memories: Sequence[Memory | None]) -> Any:
    """Return the value.

    Args:
        parcel: The value without its large pieces of memory.
        memories: The memory of each piece, uint8 [n]; None for pieces that travelled in the parcel.
    """
    pieces = [
        memory if piece.content is None else np.array(memoryview(piece.content), np.uint8)
        for piece, memory in zip(parcel.pieces, memories, strict=True)
    ]
    return put_memory_back(parcel.structure, [torch.from_numpy(piece) for piece in pieces])


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


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
