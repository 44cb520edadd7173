"""torch's default collation, directly into the memory of a slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import (
    collate,
    collate_numpy_array_fn,
    collate_tensor_fn,
    default_collate,
    default_collate_fn_map,
)

from shardio.loader.slots.memory import MIN_BYTES
from shardio.loader.slots.parcels import Arena

_MapOfFunctions = dict[Any, Callable[..., Any]]


def find_collate(collate_fn: Callable[[Any], Any], arena: Arena | None) -> Callable[[Any], Any]:
    """Return a function that makes the same batches as ``collate_fn``, if possible with their tensors in a slot.

    Args:
        collate_fn: The loader's.
        arena: The slot; None if there is none.
    """
    if collate_fn is not default_collate:
        return collate_fn
    functions: _MapOfFunctions = dict(default_collate_fn_map)
    # People may have registered functions of their own for these.
    if functions.get(torch.Tensor) is collate_tensor_fn:
        functions[torch.Tensor] = partial(_collate_tensors, arena)
        if functions.get(np.ndarray) is collate_numpy_array_fn:
            functions[np.ndarray] = partial(_collate_arrays, arena)
    return partial(collate, collate_fn_map=functions)


def _collate_tensors(arena: Arena | None, batch: Sequence[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    if first.is_nested or not all(map(partial(_is_like, first), batch)):
        collated: torch.Tensor = collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        return collated
    out = _make(arena, first.dtype, (len(batch), *first.shape))
    return torch.stack(tuple(batch), out=out)


def _collate_arrays(arena: Arena | None, batch: Sequence[Any], *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    is_plain = first.dtype.kind in "biufc" and first.dtype.isnative and first.ndim
    if is_plain and all(
        type(each) is np.ndarray and each.dtype == first.dtype and each.shape == first.shape for each in batch
    ):
        out = _make(arena, torch.from_numpy(np.empty(0, first.dtype)).dtype, (len(batch), *first.shape))
        if out is not None:
            np.stack(batch, out=out.numpy())
            return out
    collated: torch.Tensor = collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)
    return collated


def _is_like(first: torch.Tensor, other: Any) -> bool:
    return (
        type(other) is torch.Tensor
        and not other.is_nested  # It has no shape.
        and other.dtype == first.dtype
        and other.shape == first.shape
        and other.device.type == "cpu"
        and other.layout == torch.strided
        and not (other.requires_grad or other.is_quantized)
    )


def _make(arena: Arena | None, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return a tensor in the slot; None if it is small, or does not fit."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if arena is None or num_bytes < MIN_BYTES or (memory := arena.take(num_bytes)) is None:
        return None
    return torch.from_numpy(memory).view(dtype).view(shape)
