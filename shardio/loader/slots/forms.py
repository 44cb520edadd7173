"""The form in which a slot stores the values of a field: arrays, for tensors and images, too."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.images import holds_images
from shardio.loader.slots.memory import MIN_BYTES
from shardio.transforms import Ragged


def as_stored(name: str, value: Any) -> NDArray[Any] | None:
    """Return a value as the array that a slot can store, without a copy; None if it can store none.

    Args:
        name: The name of the value's field. Images are uint8 arrays [height, width, 3], tensors uint8 [3, height,
            width], or whatever a transform returned; only for images is the difference between the first two undone.
        value: The value.
    """
    if isinstance(value, Ragged):
        return None
    torch = sys.modules.get("torch")
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if is_tensor:
        value = _as_array(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc" or not value.dtype.isnative:
        return None
    if holds_images(name) and value.dtype == np.uint8 and value.ndim == 3:
        if is_tensor and len(value) == 3:
            value = value.transpose(1, 2, 0)
        elif is_tensor and value.shape[2] == 3:
            return None  # It has the shape of an image [height, width, 3], but is none.
        elif not is_tensor and value.shape[2] != 3:
            return None  # An image of other channels, which a batch holds as [channels, height, width].
    return value if holds_images(name) or value.nbytes >= MIN_BYTES else None


def is_image(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return whether stored items of this dtype and shape are images [height, width, 3]."""
    return holds_images(name) and dtype == np.uint8 and len(shape) == 3 and shape[2] == 3


def _as_array(tensor: Any) -> NDArray[Any] | None:
    """Return a tensor's memory as an array; None if numpy cannot read it."""
    torch = sys.modules["torch"]
    try:
        array: NDArray[Any] = tensor.as_subclass(torch.Tensor).numpy()
    except (RuntimeError, TypeError):  # It needs a gradient, is on another device, sparse, or of a dtype of torch's.
        return None
    return array
