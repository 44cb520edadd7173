"""Nested batches: apply functions to their tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

OnTensor = Callable[[torch.Tensor], torch.Tensor]


@runtime_checkable
class Movable(Protocol):
    """An object that moves itself to a device, such as torch's PackedSequence."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Any: ...


def map_tensors(batch: Any, function: OnTensor, movable: Callable[[Movable], Any] | None = None) -> Any:
    """Apply a function to every tensor of a nested batch, and to every numeric array as a tensor.

    Args:
        batch: Tensors and numpy arrays in tuples, named tuples, lists, mappings and dataclasses.
            Other values are kept.
        function: The function for tensors.
        movable: The function for other objects with a method ``to``; if None, they are kept.

    Returns:
        A batch with new containers of the same types. The given batch does not change.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return function(value)
        if isinstance(value, np.ndarray) and (tensor := _as_tensor(value)) is not None:
            return function(tensor)
        if movable is not None and isinstance(value, Movable) and not isinstance(value, type):
            return movable(value)
        if isinstance(value, MutableMapping) and (isinstance(value, dict) or hasattr(value, "__copy__")):
            mapped = copy.copy(value)  # This keeps the class, and settings such as default_factory.
            for name, item in value.items():
                mapped[name] = walk(item)  # Counter.update() would add.
            return mapped
        if isinstance(value, Mapping):  # Without __copy__, a shallow copy may share its items with the original.
            return type(value)({name: walk(item) for name, item in value.items()})  # type: ignore[call-arg]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(walk, value))
        if isinstance(value, list | tuple):
            return type(value)(map(walk, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _walk_dataclass(value, walk)
        return value

    return walk(batch)


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """Return an array as a tensor, in the same memory if possible; None if torch cannot."""
    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        return None
    try:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError):  # A float type that torch lacks, or negative strides.
        return None


def _walk_dataclass(value: Any, walk: Callable[[Any], Any]) -> Any:
    mapped = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(mapped, field.name, walk(getattr(value, field.name)))  # The class may be frozen.
    return mapped
