"""How a chunk is made: read its samples, draw the transforms' parameters, decode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardio.decoding import FieldDecoder, refuse_wide
from shardio.errors import SampleError, move_mark
from shardio.images import DecoderName, prepare_kernel
from shardio.loader.processes.messages import Chunk, Made, StageTimes
from shardio.loader.slots.forms import as_stored
from shardio.loader.slots.memory import Column
from shardio.shards import LABEL_FIELD

if TYPE_CHECKING:
    from shardio.loader.collation import Collation  # It imports torch.
    from shardio.reading import Reader

Rows = Mapping[int, NDArray[Any]]
"""The destination of a chunk's n values, by column: [n, *shape of an item]."""


class ChunkBuilder:
    """A builder of chunks, for any number of threads at a time.

    Args:
        reader: Reads samples.
        decoder: Decodes them.
        collation: Makes whole batches of them; None if a batch consists of columns.
    """

    def __init__(self, reader: Reader, decoder: FieldDecoder, collation: Collation | None = None) -> None:
        self._reader = reader
        self._decoder = decoder
        self._collation = collation
        if decoder.image_names:
            prepare_kernel()

    @property
    def collates(self) -> bool:
        """Whether it makes whole batches."""
        return self._collation is not None

    def make(self, chunk: Chunk, rows: Rows, idle_s: float = 0.0) -> Made:
        """Make a chunk.

        Args:
            chunk: What to make.
            rows: The destinations of fixed-size columns. A column that does not fit is returned instead.
            idle_s: How long the thread waited for the chunk.

        Raises:
            SampleError: If a sample cannot be read or decoded.
        """
        if self._collation is not None:
            return self._collate(self._collation, chunk, idle_s)
        decoder, columns, num_images_by_decoder = self._decoder, list[Column](), Counter[DecoderName]()
        began = time.perf_counter()
        stored = self._reader.read(chunk.samples, decoder.stored_fields)
        read_s = time.perf_counter() - began
        calls = decoder.make_calls()
        before = time.perf_counter()
        planned = decoder.plan(stored, chunk.rng_keys, calls)
        transform_s = time.perf_counter() - before
        others = decoder.decode_others(planned, stored, chunk.rng_keys, calls)
        for name in decoder.names:
            if (images := planned.images.get(name)) is None:
                refuse_wide(stored, name, others[name])  # The batch will hold tensors.
                columns.append(_compact(name, others[name], rows.get(len(columns))))
                continue
            places = [rows.get(len(columns) + crop) for crop in range(len(images.crops))]
            given = [each if images.fits(crop, each) else None for crop, each in enumerate(places)]
            rendered = images.render(given)
            num_images_by_decoder.update(rendered[0].decoder_names)  # Each image counts once.
            columns += [
                _store(name, made.images, place) if destination is None else None
                for made, destination, place in zip(rendered, given, places, strict=True)
            ]
        if calls.elapsed_s:  # Planning has decoded images for people's own transforms.
            transform_s = calls.elapsed_s
        decode_s = time.perf_counter() - began - read_s - transform_s
        times = StageTimes(
            idle_s=idle_s, read_s=read_s, transform_s=transform_s, python_s=calls.elapsed_s, decode_s=decode_s
        )
        return Made(chunk_id=chunk.chunk_id, columns=columns, times=times, num_images_by_decoder=num_images_by_decoder)

    def _collate(self, collation: Collation, chunk: Chunk, idle_s: float) -> Made:
        """Make a chunk that is a whole batch."""
        decoder, samples, num_images_by_decoder = self._decoder, list[Any](), Counter[DecoderName]()
        began = time.perf_counter()
        read_s, calls = 0.0, decoder.make_calls()
        for start in range(0, len(chunk.rng_keys), decoder.chunk_size):
            rows = slice(start, start + decoder.chunk_size)
            before = time.perf_counter()
            try:
                stored = self._reader.read(chunk.samples[rows], decoder.stored_fields)
                read_s += time.perf_counter() - before
                samples += collation.decode(decoder, stored, chunk.rng_keys[rows], calls)
            except SampleError as error:
                raise error.at_row(start + error.row) from error
            except Exception as error:  # Re-raised: one of the user's own code.
                move_mark(error, start)
                raise
            num_images_by_decoder.update(calls.decoder_names)
            calls.decoder_names = []
        batch, collate_s = collation.collate(samples, chunk.rng_keys, chunk.valid)
        python_s = calls.elapsed_s + collate_s
        decode_s = time.perf_counter() - began - read_s - python_s
        times = StageTimes(idle_s=idle_s, read_s=read_s, transform_s=python_s, python_s=python_s, decode_s=decode_s)
        return Made(
            chunk_id=chunk.chunk_id,
            columns=[],
            batch=batch,
            times=times,
            num_images_by_decoder=num_images_by_decoder,
        )


def pack(made: Made, rows: Rows) -> Made:
    """Return a batch that a collation made as it is sent to another process.

    Args:
        made: The batch.
        rows: The destinations of its pieces of memory, each with one row. One that does not fit is sent instead.
    """
    from shardio.loader.slots.structures import take_memory_out  # It imports torch, which the collation needs, too.

    structure, pieces = take_memory_out(made.batch)
    columns = [_store("", [piece], rows.get(index)) for index, piece in enumerate(pieces)]
    return replace(made, batch=structure, columns=columns)


def _compact(name: str, values: list[Any], destination: NDArray[Any] | None) -> Column:
    """Return a column as it is sent: labels as int64 [n]; None for arrays that were copied to the slot."""
    if name in ("label", LABEL_FIELD) and None not in values:
        return np.array(values, np.int64)
    return _store(name, values, destination)


def _store(name: str, values: list[Any], destination: NDArray[Any] | None) -> Column:
    """Copy values to their rows and return None, or return the values if they do not fit."""
    if destination is None:
        return values
    stored = [as_stored(name, value) for value in values]
    if any(each is None or (each.dtype, each.shape) != (destination.dtype, destination.shape[1:]) for each in stored):
        return values
    for row, value in zip(destination, stored, strict=True):
        row[...] = value
    return None
