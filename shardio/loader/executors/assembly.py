"""Assembly of the user's batch from the columns of its parts: tensors over a slot, and the other columns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data._utils.pin_memory import pin_memory

from shardio.bad_samples import all_skipped
from shardio.datasets import as_tensor
from shardio.decoding import FieldDecoder
from shardio.device.batches import map_tensors
from shardio.images import holds_images
from shardio.interruptions import let_through
from shardio.loader.collate import collate_column
from shardio.loader.executors.in_flight import Batch, BatchSettings, Part
from shardio.loader.failures import Failure
from shardio.loader.slots.forms import is_image
from shardio.loader.slots.memory import Column
from shardio.loader.slots.slot_pool import Views
from shardio.loader.slots.structures import Structure, put_memory_back
from shardio.loader.stats import Tally


def finish_batch(
    decoder: FieldDecoder, batch: Batch, views: Views, tally: Tally, began: float, settings: BatchSettings
) -> Any:
    """Return the user's batch and count it, or return a Failure instead.

    Args:
        decoder: Names the fields.
        batch: A batch that is finished or has failed.
        views: The columns in its slot.
        tally: Counts the batch.
        began: When the user requested it, by ``time.perf_counter``.
        settings: What all batches of the loader have in common.
    """
    if batch.error is not None:
        return Failure(error=batch.error)
    try:
        if settings.collation is not None:
            assembled = _unpack(batch, views)
            if settings.pins:
                assembled = pin_memory(assembled)  # torch's own, which knows how to pin people's classes.
        else:
            assembled = assemble_batch(decoder, batch, views)
            if settings.pins:
                assembled = map_tensors(assembled, torch.Tensor.pin_memory)
    except Exception as error:
        let_through(error)
        return Failure(error=error)
    tally.count_batch(batch.num_samples, batch.num_images_by_decoder, time.perf_counter() - began)
    return assembled


def assemble_batch(decoder: FieldDecoder, batch: Batch, views: Views) -> Any:
    """Return the user's batch.

    Args:
        decoder: Names the fields.
        batch: A finished batch.
        views: The columns in its slot.

    Returns:
        A list of columns, or a single column, of the types that torch gives; images as uint8 [N, 3, H, W] in
        channels_last memory, or a list of such tensors for a MultiCrop.

    Raises:
        SampleError: If all samples were skipped.
        ValueError: If images differ in size.
    """
    parts = _find_parts(batch)
    rows = [slice(part.row, part.row + len(part.plan)) for part in parts]  # With gaps where samples were skipped.
    is_marked = parts[0].plan.valid is not None
    is_bare = isinstance(decoder.fields, str) and not is_marked
    columns = [
        _join(name, rows, [(part.columns or [])[index] for part in parts], views.get(index), is_bare=is_bare)
        for index, name in enumerate(decoder.column_names)
    ]
    columns = decoder.join_crops(columns, list)
    if is_marked:
        columns.append(torch.from_numpy(np.concatenate([part.plan.valid for part in parts])))
    return columns[0] if is_bare else columns


def _find_parts(batch: Batch) -> list[Part]:
    """Return the parts of a batch that have samples."""
    parts = [part for part in batch.parts if len(part.plan)]
    if not parts:
        raise all_skipped([key for part in batch.parts for key in part.skipped])
    return parts


def _unpack(batch: Batch, views: Views) -> Any:
    """Return the batch that a collation made."""
    (part,) = _find_parts(batch)
    if not isinstance(part.batch, Structure):
        return part.batch
    pieces = [
        # Index the tensor, not the array: numpy's slices hold the slot's memory, not the array that the pool watches.
        torch.from_numpy(views[index])[0] if column is None else torch.from_numpy(column[0])
        for index, column in enumerate(part.columns or [])
    ]
    return put_memory_back(part.batch, pieces)


def _join(
    name: str, rows: Sequence[slice], pieces: Sequence[Column], view: NDArray[Any] | None, *, is_bare: bool
) -> Any:
    if all(piece is None for piece in pieces):
        assert view is not None, "a piece that is None is in the slot"
        return _as_images(name, _cut(view, rows))
    if all(isinstance(piece, np.ndarray) for piece in pieces):
        return torch.from_numpy(np.concatenate(pieces))  # type: ignore[arg-type]  # all are arrays
    values: list[Any] = []
    for piece, part_rows in zip(pieces, rows, strict=True):
        if piece is None:
            assert view is not None, "a piece that is None is in the slot"
            values += _as_images(name, torch.from_numpy(view)[part_rows])
        else:
            values += piece
    if holds_images(name):
        values = list(map(as_tensor, values))
    return collate_column(values if is_bare else tuple(values))  # As torch transposes samples.


def _cut(view: NDArray[Any], rows: Sequence[slice]) -> torch.Tensor:
    """Return some rows, without a copy if they are adjacent."""
    is_gapless = all(previous.stop == following.start for previous, following in pairwise(rows))
    if not is_gapless:
        return torch.from_numpy(np.concatenate([view[part_rows] for part_rows in rows]))
    # Slice the tensor, not the array: numpy's slices hold the slot's memory, not the array that the pool watches.
    return torch.from_numpy(view)[rows[0].start : rows[-1].stop]


def _as_images(name: str, column: torch.Tensor) -> torch.Tensor:
    """Return images [N, height, width, 3] as [N, 3, height, width], and any other column unchanged."""
    item = column.numpy()[:0]
    return column.permute(0, 3, 1, 2) if is_image(name, item.dtype, item.shape[1:]) else column
