"""PackedTokens: blocks with a fixed number of tokens, from documents of any length.

A layout divides the documents of one shard into blocks. The layout is computed from the shard's index alone, so blocks
are numbered and shuffled like samples. Every token is in exactly one block. Blocks that are not full are padded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from shardio.datasets.map_datasets import MapDataset
from shardio.datasets.samples import RemoteSettings, takes
from shardio.decoding import FieldDecoder, read_npy_header
from shardio.errors import FormatError, SampleError
from shardio.files import FileRange
from shardio.order import Words
from shardio.reading import RemoteParts, RemoteSamples, SampleReader, Verify, find_remote_shards
from shardio.shards import DatasetSource, open_table, read_columns
from shardio.values import check_choice, check_integer, check_optional_integer

Ints = NDArray[np.int64]

Packing = Literal["cut", "best-fit"]
"""The way in which documents are divided into blocks."""

TOKENS = "npy"
"""The field that holds a document's tokens."""

TokenField = Literal["tokens", "documents", "positions"]
"""The values of a block."""

LAYOUTS_KEPT = 64
"""The number of shards whose layouts are kept in memory, at 16 bytes per document."""

LONG = 4
"""If more than this number of blocks precede a block in its document, the document is not read in full."""

NPY_HEAD = 128
"""The size of the header of an npy file with a one-dimensional array of integers."""

MAX_INT32 = 2**31


@dataclass(frozen=True, kw_only=True)
class TokenSettings(RemoteSettings):
    """The arguments of PackedTokens.

    Attributes:
        source: A packed directory or any other source of :class:`shardio.ShardDataset`. Each sample is a document: a
            one-dimensional array of integers in the field ``npy``.
        block: The number of tokens in a block. To predict each of 2,048 tokens from those before it, use 2049.
        eos: The token that ends each document; None to add none.
        packing: ``cut`` puts documents one after another and cuts them where a block is full. ``best-fit`` keeps
            documents whole if they fit in a block, and pads the blocks.
        window: With ``best-fit``, the number of neighboring documents that are packed together.
        pad: The token that fills the rest of a block, where ``documents`` is -1.
        fields: The values of a block, or a single name for the bare value.
        verify: ``first`` compares each document with the index when a process first reads it; ``off`` compares
            nothing.
    """

    source: DatasetSource = field(kw_only=False)
    block: int = field(default=2049, kw_only=False)
    eos: int | None = None
    packing: Packing = "cut"
    window: int = 1024
    pad: int = 0
    fields: Sequence[TokenField] | TokenField = ("tokens", "documents", "positions")
    verify: Verify = "first"


class PackedTokens(MapDataset):
    """A map-style dataset of blocks of tokens.

    Every token of every document is in exactly one block, and blocks are shuffled, split over ranks and resumed like
    the samples of any dataset: use ``sampler=EpochSampler(dataset)``, or mix the dataset with others in a MixedDataset.

    A block is a tuple of int32 tensors [block]: ``tokens``; ``documents``, the index of each token's document in the
    dataset, for limiting attention to a document; and ``positions``, each token's place in its document.

    >>> tokens = PackedTokens("packed", 2049, eos=50256)  # doctest: +SKIP
    >>> loader = DataLoader(tokens, batch_size=16, sampler=EpochSampler(tokens), num_workers=2)  # doctest: +SKIP

    Raises:
        FileNotFoundError: If ``source`` does not exist.
        FormatError: If ``source`` is not a dataset, or its documents are not arrays of integers.
        ValueError: If an argument is out of range, or no sample has the field ``npy``.
    """

    @takes(TokenSettings)
    def __init__(self, options: TokenSettings) -> None:
        self.block = check_integer("block", options.block, at_least=1)
        self._eos = check_optional_integer("eos", options.eos, at_least=0)
        self._pad = check_integer("pad", options.pad, at_least=0)
        self._packing: Packing = check_choice("packing", options.packing, Packing)
        self._window = check_integer("window", options.window, at_least=1)
        names = (options.fields,) if isinstance(options.fields, str) else tuple(options.fields)
        if not names or set(names) - set(get_args(TokenField)):
            raise ValueError(f"fields must be a subset of {', '.join(get_args(TokenField))}, got {options.fields!r}")
        self._is_bare = isinstance(options.fields, str)
        fillers = {"tokens": self._pad, "documents": -1, "positions": 0}
        self._fillers: dict[TokenField, int] = {name: fillers[name] for name in names}
        self.table = open_table(options.source, options.make_access())
        decoder = FieldDecoder(fields=TOKENS)
        decoder.check_fields(self.table.manifest.fields, str(options.source))
        self._documents = SampleReader(self.table, options.verify)
        super().__init__(decoder, self._documents)
        self._document_starts = np.cumsum(self.table.manifest.shard_sizes) - self.table.manifest.shard_sizes
        self._format = self._read_first()
        self._layouts = lru_cache(maxsize=LAYOUTS_KEPT)(self._make_layout)
        num_shards = len(self.table.tars)
        self.shard_sizes = np.array([self._layouts(shard).num_blocks for shard in range(num_shards)], np.int64)
        self._stops = np.cumsum(self.shard_sizes)
        settings = f"{self.block} {self._eos} {self._pad} {self._packing}"
        settings += f" {self._window}" if self._packing == "best-fit" else ""
        self.digest = xxhash.xxh3_128_hexdigest(f"{self.table.manifest.digest} {settings}".encode())

    def __len__(self) -> int:
        return int(self._stops[-1])

    def read(self, indices: NDArray[np.int64], rng_keys: Words) -> list[Any]:
        """Return the blocks at the indices, int64 [n]. Random numbers are not used."""
        pieces = self._find_pieces(indices)
        found, places = np.unique(pieces.documents, return_inverse=True)
        is_alone = np.bincount(pieces.rows)[pieces.rows] == 1
        is_long = bool((is_alone & (pieces.starts > LONG * self.block)).any())
        try:  # For a block deep inside a long document, read only the part of the document that the block contains.
            contents = self._documents.read(found, (TOKENS,), (TOKENS,) if is_long else ()).columns[TOKENS]
        except SampleError as error:  # The error holds the row of a document: find the block's row.
            raise error.at_row(int(pieces.rows[places == error.row][0])) from error
        values = self._fill(pieces, [contents[place] for place in places.tolist()], len(indices))
        columns = [[torch.from_numpy(row.copy()) for row in array] for array in values]  # A view keeps all rows alive.
        return columns[0] if self._is_bare else list(zip(*columns, strict=True))

    def describe(self, index: int) -> tuple[str, str]:
        pieces = self._find_pieces(np.array([index]))
        return self._documents.describe(int(pieces.documents[0]), (TOKENS,))

    def remote_samples(self) -> RemoteSamples | None:
        shards = find_remote_shards(self.table, (TOKENS,))
        if shards is None:
            return None
        return RemoteParts([shards], lambda indices: iter([(0, self._find_pieces(indices).documents)]))

    def _find_pieces(self, indices: NDArray[np.int64]) -> Pieces:
        # The pieces of blocks, with the documents' indices in the dataset.
        shards = np.searchsorted(self._stops, indices, side="right")
        inner = indices - (self._stops - self.shard_sizes)[shards]
        parts = list[Pieces]()
        for shard in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == shard)
            own = self._layouts(shard).find_pieces(inner[rows])
            documents = own.documents + self._document_starts[shard]
            parts.append(own._replace(rows=rows[own.rows], documents=documents))
        pieces = Pieces(*map(np.concatenate, zip(*parts, strict=True)))
        order = np.argsort(pieces.rows, kind="stable")
        return Pieces(*(each[order] for each in pieces))

    def _fill(self, pieces: Pieces, contents: Sequence[Any], num_blocks: int) -> list[NDArray[np.int32]]:
        # The values of the blocks, each int32 [n, block].
        lengths = pieces.stops - pieces.starts
        before = np.cumsum(lengths) - lengths  # the tokens of earlier pieces
        is_first = np.diff(pieces.rows, prepend=-1) > 0
        places = pieces.rows * self.block + before - before[is_first][pieces.rows]
        values = list[NDArray[np.int32]]()
        for name, filler in self._fillers.items():
            flat = np.full(num_blocks * self.block, filler, np.int32)
            if name == "tokens":
                self._copy_tokens(pieces, contents, places, flat)
            else:
                number = np.arange(lengths.sum())
                documents, positions = pieces.documents, pieces.starts - before
                found = np.repeat(documents if name == "documents" else positions, lengths)
                flat[number + np.repeat(places - before, lengths)] = found if name == "documents" else found + number
            values.append(flat.reshape(num_blocks, self.block))
        return values

    def _copy_tokens(
        self, pieces: Pieces, contents: Sequence[Any], places: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        number = -1
        ranges = (each.tolist() for each in (places, pieces.starts, pieces.stops))
        try:
            for number, (content, place, start, stop) in enumerate(zip(contents, *ranges, strict=True)):  # noqa: B007  # For errors.
                self._format.copy(content, start, stop, self._eos, tokens[place : place + stop - start])
        except ValueError as error:
            key, where = self._documents.describe(int(pieces.documents[number]), (TOKENS,))
            message = f"the tokens of {key} in {where} cannot be read: {error}"
            raise SampleError(message, row=int(pieces.rows[number]), key=key, where=where, stage="decode") from error

    def _read_first(self) -> DocumentFormat:
        first = self._documents.read(np.array([0]), (TOKENS,))
        key, where = first.describe(0)
        content = first.columns[TOKENS][0] or b""
        try:
            return DocumentFormat.of(content)
        except ValueError as error:
            raise FormatError(f"the document {key} in {where} cannot be read as tokens: {error}") from error

    def _make_layout(self, shard: int) -> TokenLayout:
        columns = read_columns(self.table.indexes[shard])
        sizes = columns.sizes[columns.header.fields.index(TOKENS)] - NPY_HEAD
        itemsize = self._format.dtype.itemsize
        if (wrong := (sizes < 0) | (sizes % itemsize != 0)).any():
            key = columns.keys[int(np.argmax(wrong))].decode(errors="backslashreplace")
            raise FormatError(
                f"the document {key} of {self.table.tars[shard]} is not an array of {self._format.dtype}, unlike "
                "the first document: pack all documents with the same dtype"
            )
        lengths = sizes // itemsize + (self._eos is not None)
        if self._packing == "cut":
            return CutLayout(lengths, self.block)
        return BestFitLayout(lengths, self.block, self._window)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_layouts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._layouts = lru_cache(maxsize=LAYOUTS_KEPT)(self._make_layout)


@dataclass(frozen=True, slots=True)
class DocumentFormat:
    """The format of documents whose npy headers differ only in the number of tokens.

    Attributes:
        dtype: The type of the tokens.
        prefix: The header up to the number of tokens.
    """

    dtype: np.dtype[Any]
    prefix: bytes

    @classmethod
    def of(cls, content: bytes) -> DocumentFormat:
        """Return the format of a document.

        Raises:
            ValueError: If the document is not a one-dimensional array of integers that numpy saved.
        """
        start, shape, dtype = read_npy_header(content)
        if len(shape) != 1 or dtype.kind not in "iu" or start != NPY_HEAD:
            raise ValueError(f"it must be a one-dimensional array of integers, got shape {shape} and dtype {dtype}")
        return cls(dtype, content[: content.index(b"(") + 1])

    def copy(
        self, content: bytes | FileRange, start: int, stop: int, eos: int | None, tokens: NDArray[np.int32]
    ) -> None:
        """Copy a piece of a document to ``tokens``, adding ``eos`` if the piece extends past the document's end.

        Raises:
            ValueError: If the document has a different format, or a token does not fit in int32.
        """
        num_bytes, head = (len(content), content) if isinstance(content, bytes) else (content.num_bytes, content.head)
        size = self.dtype.itemsize
        length = (num_bytes - NPY_HEAD) // size
        if not head.startswith(self.prefix + b"%d,)" % length):
            raise ValueError(f"it must be a one-dimensional array of {self.dtype}, like the first document")
        end, begin = min(stop, length), NPY_HEAD + start * size
        if isinstance(content, bytes):
            values = np.frombuffer(content, self.dtype, end - start, begin)
        else:
            values = np.frombuffer(content.read((end - start) * size, begin), self.dtype)
        may_exceed = len(values) and not np.can_cast(self.dtype, np.int32)
        if may_exceed and not -MAX_INT32 <= values.min() <= values.max() < MAX_INT32:
            raise ValueError("a token does not fit in int32")
        tokens[: end - start] = values
        if stop > length:
            assert eos is not None, "only eos follows the document"
            tokens[end - start] = eos


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
    """Whole documents, if they fit: in a window of neighboring documents, each goes into the fullest block with room.

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
