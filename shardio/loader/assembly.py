"""From the columns of a batch's parts to what the user gets: tensors over a slot, and what travelled beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardio.datasets.bad_samples import all_skipped
from shardio.decoding import FieldDecoder
from shardio.loader.collate import collate_column
from shardio.loader.messages import Column
from shardio.loader.pending import Batch
from shardio.loader.slots import Views


def assemble_batch(decoder: FieldDecoder, batch: Batch, views: Views) -> Any:
    """Make what the user gets of a batch that is made.

    Args:
        decoder: Names the fields.
        batch: Its parts.
        views: What lies in its slot.

    Raises:
        SampleError: If all of its samples were skipped.
        ValueError: If images differ in size.
    """
    parts = [part for part in batch.parts if len(part.plan)]
    if not parts:
        raise all_skipped([key for part in batch.parts for key in part.skipped])
    rows = [slice(part.row, part.row + len(part.plan)) for part in parts]
    is_marked = parts[0].plan.valid is not None
    valid = np.concatenate([part.plan.valid for part in parts]) if is_marked else None
    columns = [part.columns or [] for part in parts]
    return assemble(decoder, list(zip(rows, columns, strict=True)), views, valid)


def assemble(
    decoder: FieldDecoder,
    parts: Sequence[tuple[slice, Sequence[Column]]],
    views: Views,
    valid: NDArray[np.bool_] | None,
) -> Any:
    """Make a batch.

    Args:
        decoder: Names the fields.
        parts: The rows that each part has, and its columns. Rows that are missing in between were left out.
        views: What lies in the batch's slot.
        valid: bool [n], for the field ``valid``, if there is to be one.

    Returns:
        A list of columns, or the only one; images as uint8 [N, 3, H, W] in channels_last memory.

    Raises:
        ValueError: If images differ in size.
    """
    rows = [rows for rows, _ in parts]
    columns = [
        _join(name, rows, [part[place] for _, part in parts], views.get(place))
        for place, name in enumerate(decoder.names)
    ]
    marks = [] if valid is None else [torch.from_numpy(valid)]
    return columns[0] if isinstance(decoder.fields, str) and not marks else [*columns, *marks]


def _join(name: str, rows: Sequence[slice], pieces: Sequence[Column], view: NDArray[Any] | None) -> Any:
    if all(piece is None for piece in pieces):
        assert view is not None, "a piece that is not here lies in the slot"
        return _as_images(name, _cut(view, rows))
    if all(isinstance(piece, np.ndarray) for piece in pieces):
        return torch.from_numpy(np.concatenate(pieces))  # type: ignore[arg-type]  # all are arrays
    values: list[Any] = []
    for piece, where in zip(pieces, rows, strict=True):
        values += list(view[where]) if piece is None and view is not None else list(piece)  # type: ignore[arg-type]
    if name == "image":
        values = [torch.from_numpy(image).permute(2, 0, 1) for image in values]
    return collate_column(values)


def _cut(view: NDArray[Any], rows: Sequence[slice]) -> torch.Tensor:
    """Return some rows, without a copy if they follow each other."""
    is_gapless = all(before.stop == after.start for before, after in pairwise(rows))
    if not is_gapless:
        return torch.from_numpy(np.concatenate([view[where] for where in rows]))
    # Of the tensor, not of the array: numpy's slices hold the slot's memory, and not the array that is watched.
    return torch.from_numpy(view)[rows[0].start : rows[-1].stop]


def _as_images(name: str, column: torch.Tensor) -> torch.Tensor:
    return column.permute(0, 3, 1, 2) if name == "image" else column
