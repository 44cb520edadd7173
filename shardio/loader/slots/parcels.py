"""Values of any structure between processes: their structure, and the memory of their tensors and arrays.

The memory is in a slot, in memory made for this value alone or, if it is small, beside the structure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardio.loader.slots.memory import MIN_BYTES
from shardio.loader.slots.structures import (
    ALIGNMENT,
    Memory,
    Structure,
    put_memory_back,
    take_memory_out,
)


@dataclass(kw_only=True, eq=False)
class Piece:
    """A piece of memory.

    Attributes:
        content: The bytes, if they travel in the parcel.
        span: Otherwise, where they are in the slot: the first byte, and the one after the last.
    """

    content: bytes | None = None
    span: tuple[int, int] = (0, 0)


@dataclass(kw_only=True, eq=False)
class Parcel:
    """A value without its large pieces of memory.

    Attributes:
        structure: The value without any.
        pieces: Its memory.
        num_bytes: How many bytes of a slot the pieces need.
        is_in_slot: Whether they are in the slot that was given; otherwise they are in memory of their own.
    """

    structure: Structure
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


def pack(value: Any, arena: Arena | None, make_memory: Callable[[int], Memory]) -> Parcel:
    """Return a value as a parcel.

    Args:
        value: Any value that can be pickled.
        arena: A slot for its memory; what is there already is not copied. None if there is no slot.
        make_memory: Returns memory of n bytes, for what does not fit into the arena.
    """
    structure, memories = take_memory_out(value)
    pieces = [Piece(content=memory.tobytes() if len(memory) < MIN_BYTES else None) for memory in memories]
    large = [(piece, memory) for piece, memory in zip(pieces, memories, strict=True) if piece.content is None]
    num_bytes = sum(_align(len(memory)) for _, memory in large)
    is_in_slot = arena is not None and _place(large, arena)
    if large and not is_in_slot:
        _place(large, Arena(make_memory(num_bytes)))
    return Parcel(structure=structure, pieces=pieces, num_bytes=num_bytes, is_in_slot=is_in_slot)


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
