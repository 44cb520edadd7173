"""From a chunk to its rows: read, draw the transforms' parameters, decode."""

from __future__ import annotations

import pickle
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.decoding import FieldDecoder, refuse_wide
from shardio.errors import SampleError
from shardio.images import DecoderName, prepare_kernel
from shardio.loader.messages import Chunk, Column, Failed, Made, StageTimes, Unreadable
from shardio.reading import FileReader, SampleReader
from shardio.shards import LABEL_FIELD

Rows = Mapping[int, NDArray[Any]]
"""By the place of a field: where its n values go, [n, *shape of an item]."""


class ChunkMaker:
    """Makes chunks, in any number of threads at a time."""

    def __init__(self, reader: SampleReader | FileReader, decoder: FieldDecoder) -> None:
        self._reader = reader
        self._decoder = decoder
        if "image" in decoder.names:
            prepare_kernel()

    def make(self, chunk: Chunk, rows: Rows, wait_s: float = 0.0) -> Made | Unreadable:
        """Make a chunk.

        Args:
            chunk: What is to be made.
            rows: Where columns of fixed size go; one that turns out otherwise is returned instead.
            wait_s: How long the thread waited for the chunk.

        Raises:
            Exception: Whatever happens that no single sample is to blame for.
        """
        try:
            return self._make(chunk, rows, wait_s)
        except SampleError as error:
            return Unreadable(serial=chunk.serial, error=error)

    def _make(self, chunk: Chunk, rows: Rows, wait_s: float) -> Made:
        decoder, columns, num_images_by_decoder = self._decoder, list[Column](), Counter[DecoderName]()
        began = time.perf_counter()
        stored = self._reader.read(chunk.samples, decoder.stored_fields)
        read_s, transform_s = time.perf_counter() - began, 0.0
        for place, name in enumerate(decoder.names):
            destination = rows.get(place)
            if name == "image":
                before = time.perf_counter()
                planned = decoder.plan_images(stored, chunk.rng_keys)
                transform_s += time.perf_counter() - before
                rows_fit = destination is not None and planned.fits(destination)
                rendered = planned.render(destination if rows_fit else None)
                num_images_by_decoder.update(rendered.decoder_names)
                columns.append(None if rows_fit else rendered.images)
            else:
                values = decoder.decode_field(name, stored)
                if name == "json":
                    refuse_wide(stored, name, values)  # The batch is to be tensors.
                columns.append(_compact(name, values, destination))
        decode_s = time.perf_counter() - began - read_s - transform_s
        times = StageTimes(wait_s=wait_s, read_s=read_s, transform_s=transform_s, decode_s=decode_s)
        return Made(serial=chunk.serial, columns=columns, times=times, num_images_by_decoder=num_images_by_decoder)


def _compact(name: str, values: list[Any], destination: NDArray[Any] | None) -> Column:
    """Return a column as it travels: labels as int64 [n], nothing for arrays that fit the slot."""
    if name in ("label", LABEL_FIELD):
        return np.array(values, np.int64)
    if destination is not None and all(
        isinstance(value, np.ndarray) and value.dtype == destination.dtype and value.shape == destination.shape[1:]
        for value in values
    ):
        for row, value in zip(destination, values, strict=True):
            row[...] = value
        return None
    return values


def describe_failure(serial: int, error: BaseException) -> Failed:
    """Return what the training process is told of an error."""
    return Failed(serial=serial, error=_portable(error), traceback="".join(traceback.format_exception(error)))


def _portable(error: BaseException) -> BaseException:
    """Return an error that can be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # A class may refuse in any way; its words still arrive.
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
