"""The samples that a dataset yields, made from decoded columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardio.decoding import FieldDecoder
from shardio.images import holds_images
from shardio.order import Words
from shardio.reading import StoredSamples
from shardio.transforms import Calls, Ragged, is_image_array

MAX_CHANNELS = 4
"""The most channels of an image: red, green, blue and alpha."""


class RaggedTensor(torch.Tensor):
    """A tensor whose length differs between samples: a batch holds a list of them, even if all are equally long.

    Operations return plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as in torch.nn.Parameter


def decode_samples(
    decoder: FieldDecoder, stored: StoredSamples, rng_keys: Words, calls: Calls | None = None
) -> list[Any]:
    """Return the samples that a dataset yields, decoded from stored ones.

    These are tuples of values, or bare values: images are uint8 tensors [3, height, width], or tuples of these for a
    MultiCrop. What follows the images in a Compose with fields is a tensor, too: a mask [height, width], or a
    RaggedTensor of boxes, labels or points. ``transform_sample`` may return anything else.

    Args:
        decoder: Decodes them.
        stored: n samples.
        rng_keys: uint64 [n], one for each sample's random transforms.
        calls: Makes and times the calls of the user's own code; by default, a new one.

    Raises:
        SampleError: If a field is missing or cannot be decoded.
    """
    calls = calls or decoder.make_calls()
    columns = decoder.decode_columns(stored, rng_keys, calls)
    if decoder.transform_sample is not None:
        return list(map(_convert_images, decoder.transform_samples(columns, stored, rng_keys, calls)))
    followers = [(each.name, each.entry) for each in decoder.followers]
    for index, name in enumerate(decoder.names):
        if (name, None) in followers:
            columns[index] = list(map(_as_follower, columns[index]))
        elif entries := [entry for parent, entry in followers if parent == name]:
            columns[index] = [_convert_entries(value, entries) for value in columns[index]]
        elif holds_images(name):
            columns[index] = list(map(as_tensor, columns[index]))
    return list(columns[0]) if isinstance(decoder.fields, str) else list(zip(*columns, strict=True))


def mark_valid(sample: Any, is_valid: bool) -> Any:
    """Return a sample with the mark of ``remainder="mask"``, which is false for repeats.

    The mark becomes the last value of a tuple or the key ``valid`` of a dict. A bare value and its mark become a pair.
    """
    if isinstance(sample, dict):
        return {**sample, "valid": is_valid}
    return (*sample, is_valid) if isinstance(sample, tuple) else (sample, is_valid)


def _as_follower(value: Any) -> Any:
    """Return a mask, boxes, labels or points as a tensor; return anything else unchanged."""
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(np.require(value, requirements=["C", "W"]).view(np.ndarray))
    return tensor.as_subclass(RaggedTensor) if isinstance(value, Ragged) else tensor


def _convert_entries(value: Any, entries: Sequence[str | None]) -> Any:
    """Return a mapping with some of its entries as tensors; return anything else unchanged."""
    if not isinstance(value, Mapping):
        return value
    return {name: _as_follower(each) if name in entries else each for name, each in value.items()}


def _convert_images(value: Any) -> Any:
    """Return a sample with its arrays uint8 [height, width, 3] as tensors uint8 [3, height, width]."""
    if is_image_array(value):
        return as_tensor(value)
    if type(value) is dict:
        return {name: _convert_images(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_convert_images, value))
    return value


def as_tensor(image: Any) -> Any:
    """Return pixels as a tensor that shares the array's memory, also in tuples; return anything else unchanged.

    Pixels are uint8 arrays [height, width, channels]. Those of timm, [1 to 4, height, width], stay arrays.
    """
    if isinstance(image, tuple):
        return tuple(map(as_tensor, image))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3:
        if image.shape[0] <= MAX_CHANNELS < image.shape[2]:
            return image
        return torch.from_numpy(image).permute(2, 0, 1)
    return image
