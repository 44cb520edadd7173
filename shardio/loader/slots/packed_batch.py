"""A batch of any structure as a pickle with gaps, and the arrays that fill them: those can be stored in slots."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A batch without its tensors and arrays.

    Attributes:
        content: A pickle, in which :class:`_Gap` objects stand for them.
    """

    content: bytes


@dataclass(frozen=True, kw_only=True)
class _Gap:
    """The place of a tensor or an array.

    Attributes:
        index: The array that fills it.
        axes: The position of each axis of the value among the axes of that array, which is in the order of memory.
        dtype: The name of torch's dtype; "" for numpy's arrays.
    """

    index: int
    axes: tuple[int, ...]
    dtype: str


def pack_batch(batch: Any) -> tuple[PackedBatch, list[NDArray[Any]]]:
    """Take the tensors and arrays out of a batch. Each is taken out once, and subclasses of theirs not at all."""
    file = io.BytesIO()
    packer = _Packer(file, protocol=5)
    packer.dump(batch)
    return PackedBatch(content=file.getvalue()), packer.arrays


def unpack_batch(packed: PackedBatch, arrays: Sequence[torch.Tensor | NDArray[Any]]) -> Any:
    """Return the batch.

    Args:
        packed: The batch without its tensors and arrays.
        arrays: These, in order: as a tensor where tensors may share its memory, as an array where anything may.
    """
    return _Unpacker(io.BytesIO(packed.content), arrays).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.arrays: list[NDArray[Any]] = []
        self._gaps: dict[int, tuple[Any, _Gap]] = {}  # With the value, so that no other object gets its id.

    def persistent_id(self, value: Any) -> _Gap | None:
        """Return what the pickle holds instead of a value; None for the value itself."""
        if (known := self._gaps.get(id(value))) is not None:
            return known[1]
        array, dtype = _as_array(value)
        if array is None:
            return None
        # In the order of memory, so that channels_last images are copied as they are.
        order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
        gap = _Gap(index=len(self.arrays), axes=tuple(map(order.index, range(array.ndim))), dtype=dtype)
        self.arrays.append(np.ascontiguousarray(array.transpose(order)).reshape([array.shape[axis] for axis in order]))
        self._gaps[id(value)] = value, gap
        return gap


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: Sequence[torch.Tensor | NDArray[Any]]) -> None:
        super().__init__(file)
        self._arrays = arrays
        self._values: dict[int, Any] = {}

    def persistent_load(self, gap: _Gap) -> Any:
        """Return the tensor or array of a gap."""
        if gap.index not in self._values:
            self._values[gap.index] = _restore(self._arrays[gap.index], gap)
        return self._values[gap.index]


def _as_array(value: Any) -> tuple[NDArray[Any] | None, str]:
    """Return a value as an array, and the name of its torch dtype; no array if it must be pickled."""
    if type(value) is np.ndarray:
        return (value if value.dtype.kind in "biufc" and value.dtype.isnative else None), ""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout != torch.strided:
        return None, ""
    if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized:
        return None, ""
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy(), "bfloat16"
    try:
        return value.numpy(), str(value.dtype).removeprefix("torch.")
    except TypeError:  # numpy has no such dtype.
        return None, ""


def _restore(stored: torch.Tensor | NDArray[Any], gap: _Gap) -> Any:
    if not gap.dtype:
        # A copy, because slices of an array hold a slot's memory, but not the array that the pool watches.
        array = stored.numpy().copy() if isinstance(stored, torch.Tensor) else stored
        return array.transpose(gap.axes)
    tensor = stored if isinstance(stored, torch.Tensor) else torch.from_numpy(stored)
    return tensor.view(getattr(torch, gap.dtype)).permute(gap.axes)
