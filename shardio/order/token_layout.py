"""The layout of token blocks: the parts of documents in each block. Integers in, integers out.

A layout covers the documents of one shard, so it is computed from the shard's index alone, and blocks are numbered and
shuffled like samples. Every token is in exactly one block. Blocks that are not full are padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

Packing = Literal["cut", "best-fit"]
"""The way in which documents are divided into blocks."""


class Pieces(NamedTuple):
    """The parts of documents in some blocks, in order.

    Attributes:
        rows: int64 [pieces], the row of each piece's block among the given blocks; never decreasing.
        documents: int64 [pieces], the documents' indices in the shard.
        starts: int64 [pieces], the first token of each piece, counted in its document.
        stops: int64 [pieces], the end of each piece.
    """

    rows: Ints
    documents: Ints
    starts: Ints
    stops: Ints


class TokenLayout(ABC):
    """A division of documents into blocks.

    Attributes:
        num_blocks: The number of blocks.
    """

    num_blocks: int

    @abstractmethod
    def find_pieces(self, blocks: Ints) -> Pieces:
        """Return the pieces of the given blocks, int64 [n]; each block has at least one piece."""


class CutLayout(TokenLayout):
    """Documents one after another, cut where a block is full. Only the last block may need padding.

    Args:
        lengths: int64 [documents], the number of tokens of each document.
        block_size: The number of tokens in a block.
    """

    def __init__(self, lengths: Ints, block_size: int) -> None:
        self._lengths, self._stops, self._block_size = lengths, np.cumsum(lengths), block_size
        self.num_blocks = -(-int(lengths.sum()) // block_size)

    def find_pieces(self, blocks: Ints) -> Pieces:
        starts = blocks * self._block_size
        firsts = np.searchsorted(self._stops, starts, side="right")
        lasts = np.minimum(np.searchsorted(self._stops, starts + self._block_size), len(self._stops) - 1)
        counts = lasts - firsts + 1
        rows = np.repeat(np.arange(len(blocks)), counts)
        documents = np.arange(len(rows)) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
        lengths = self._lengths[documents]
        begins = starts[rows] - (self._stops[documents] - lengths)  # the block's start, counted in the document
        own_starts, own_stops = np.maximum(begins, 0), np.minimum(begins + self._block_size, lengths)
        is_needed = own_stops > own_starts  # Some documents may be empty.
        return Pieces(*(each[is_needed] for each in (rows, documents, own_starts, own_stops)))


class BestFitLayout(TokenLayout):
    """Whole documents, if they fit: in a window of neighboring documents, each goes where the least room is left.

    A document that is longer than a block is cut into full blocks and a remainder. Long pieces come first (best-fit
    decreasing), as in Ding et al., "Fewer truncations improve language modeling", 2024.

    Args:
        lengths: int64 [documents], the number of tokens of each document.
        block_size: The number of tokens in a block.
        window: The number of documents that are packed together.
    """

    def __init__(self, lengths: Ints, block_size: int, window: int) -> None:
        self._lengths, self._block_size, self._window = lengths, block_size, window
        windows = range(-(-len(lengths) // window))
        self._stops = np.cumsum([len(self._pack(number)) for number in windows], dtype=np.int64)
        self.num_blocks = int(self._stops[-1]) if len(self._stops) else 0
        self._find_window = lru_cache(maxsize=4)(self._pack)

    def find_pieces(self, blocks: Ints) -> Pieces:
        found = list[tuple[int, int, int, int]]()
        windows = np.searchsorted(self._stops, blocks, side="right")
        for row, (block, window) in enumerate(zip(blocks.tolist(), windows.tolist(), strict=True)):
            first = int(self._stops[window - 1]) if window else 0
            found += [(row, *piece) for piece in self._find_window(window)[block - first]]
        return Pieces(*np.array(found, np.int64).reshape(-1, 4).T)

    def _pack(self, window: int) -> list[list[tuple[int, int, int]]]:
        first, size = window * self._window, self._block_size
        blocks = list[list[tuple[int, int, int]]]()
        rests = list[tuple[int, int]]()
        for document, length in enumerate(self._lengths[first : first + self._window].tolist(), first):
            full = length - length % size
            blocks += [[(document, start, start + size)] for start in range(0, full, size)]
            if length > full:
                rests.append((full - length, document))
        room = list[tuple[int, int]]()  # The room in each block, and the block's number, sorted.
        for negative, document in sorted(rests):
            length = int(self._lengths[document])
            place = bisect_left(room, (-negative, 0))
            left, number = room.pop(place) if place < len(room) else (size, len(blocks))
            if number == len(blocks):
                blocks.append([])
            blocks[number].append((document, length + negative, length))
            insort(room, (left + negative, number))
        return blocks

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_find_window"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._find_window = lru_cache(maxsize=4)(self._pack)
