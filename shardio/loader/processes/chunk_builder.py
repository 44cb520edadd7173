"""How a chunk is made: read its samples, draw the transforms' parameters, decode."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.decoding import FieldDecoder, refuse_wide
from shardio.images import DecoderName, prepare_kernel
from shardio.loader.processes.messages import Chunk, Made, StageTimes
from shardio.loader.slots.forms import as_stored
from shardio.loader.slots.memory import Column
from shardio.reading import FileReader, SampleReader
from shardio.shards import LABEL_FIELD

Rows = Mapping[int, NDArray[Any]]
"""The destination of a chunk's n values, by column: [n, *shape of an item]."""


class ChunkBuilder:
    """A builder of chunks, for any number of threads at a time."""

    def __init__(self, reader: SampleReader | FileReader, decoder: FieldDecoder) -> None:
        self._reader = reader
        self._decoder = decoder
        if "image" in decoder.names:
            prepare_kernel()

    def make(self, chunk: Chunk, rows: Rows, idle_s: float = 0.0) -> Made:
        """Make a chunk.

        Args:
            chunk: What to make.
            rows: The destinations of fixed-size columns. A column that does not fit is returned instead.
            idle_s: How long the thread waited for the chunk.

        Raises:
            SampleError: If a sample cannot be read or decoded.
        """
        decoder, columns, num_images_by_decoder = self._decoder, list[Column](), Counter[DecoderName]()
        began = time.perf_counter()
        stored = self._reader.read(chunk.samples, decoder.stored_fields)
        read_s, transform_s = time.perf_counter() - began, 0.0
        for name in decoder.names:
            if name == "image":
                before = time.perf_counter()
                planned = decoder.plan_images(stored, chunk.rng_keys)
                transform_s += time.perf_counter() - before
                if planned.calls.elapsed_s:  # The images were decoded for people's own transforms.
                    transform_s = planned.calls.elapsed_s
                places = [rows.get(len(columns) + crop) for crop in range(len(planned.crops))]
                given = [each if planned.fits(crop, each) else None for crop, each in enumerate(places)]
                rendered = planned.render(given)
                num_images_by_decoder.update(rendered[0].decoder_names)  # Each image counts once.
                columns += [
                    _store(name, made.images, place) if destination is None else None
                    for made, destination, place in zip(rendered, given, places, strict=True)
                ]
            else:
                values = decoder.decode_field(name, stored, chunk.rng_keys)
                refuse_wide(stored, name, values)  # The batch will hold tensors.
                columns.append(_compact(name, values, rows.get(len(columns))))
        decode_s = time.perf_counter() - began - read_s - transform_s
        times = StageTimes(idle_s=idle_s, read_s=read_s, transform_s=transform_s, decode_s=decode_s)
        return Made(chunk_id=chunk.chunk_id, columns=columns, times=times, num_images_by_decoder=num_images_by_decoder)


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
