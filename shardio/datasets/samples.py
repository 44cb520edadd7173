"""The samples that a dataset yields, made from decoded columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardio.decoding import FieldDecoder


def make_samples(decoder: FieldDecoder, columns: Sequence[Sequence[Any]]) -> list[Any]:
    """Return a tuple of values for each sample, or its bare value.

    Images are uint8 tensors [3, height, width], or tuples of these for a MultiCrop.
    """
    columns = [
        list(map(as_tensor, column)) if name == "image" else column
        for name, column in zip(decoder.names, columns, strict=True)
    ]
    return list(columns[0]) if isinstance(decoder.fields, str) else list(zip(*columns, strict=True))


def mark_valid(sample: Any, is_valid: bool) -> Any:
    """Return a sample with the mark of ``remainder="mask"``, which is false for repeats.

    The mark becomes the last value of a tuple or the key ``valid`` of a dict. A bare value and its mark become a pair.
    """
    if isinstance(sample, dict):
        return {**sample, "valid": is_valid}
    return (*sample, is_valid) if isinstance(sample, tuple) else (sample, is_valid)


def as_tensor(image: Any) -> Any:
    """Return pixels as a tensor that shares the array's memory, also in tuples; return anything else unchanged."""
    if isinstance(image, tuple):
        return tuple(map(as_tensor, image))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3:
        return torch.from_numpy(image).permute(2, 0, 1)
    return image
