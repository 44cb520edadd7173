"""Labelled batches: find the images, the labels and the marks of repeats, and replace tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from shardio.device.batches import map_tensors

LabelsGetter = Callable[[Any], Any] | Literal["default"]
"""A function that returns the labels of a batch. "default" finds them as :func:`find_labels` says."""


def find_images(batch: Any) -> torch.Tensor:
    """Return the images of a batch: its only tensor [N, C, H, W].

    Raises:
        ValueError: If the batch has no such tensor, or several.
    """
    found = list[torch.Tensor]()

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 4:
            found.append(tensor)
        return tensor

    map_tensors(batch, collect)
    if len(found) != 1:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in found) or "none"
        raise ValueError(
            f"a batch must have exactly one tensor of images [N, C, H, W], got {shapes}: transform other batches in a "
            "function of your own, which passes on images and labels"
        )
    return found[0]


def find_labels(batch: Any, getter: LabelsGetter) -> torch.Tensor:
    """Return the labels of a batch.

    By default, these are the second value of a tuple or a list. In a mapping, or if the second value is one, they have
    the key ``labels`` or, without it, the first key that contains ``label``, in upper or lower case (torchvision's
    rule).

    Raises:
        TypeError: If the labels are not a tensor, or are not found.
    """
    labels = _find_by_default(batch) if getter == "default" else getter(batch)
    if not isinstance(labels, torch.Tensor):
        raise TypeError(
            f"the labels of a batch must be a tensor, got {type(labels).__name__}: pass images and labels, a mapping "
            "with the key 'labels', or labels_getter"
        )
    return labels


def find_valid(batch: Any) -> torch.Tensor | None:
    """Return the marks that ``remainder="mask"`` adds, bool [N], false for repeats; None if there are none."""
    if isinstance(batch, Mapping):
        valid = batch.get("valid")
    else:
        valid = batch[-1] if isinstance(batch, tuple | list) and batch else None
    is_mask = isinstance(valid, torch.Tensor) and valid.dtype == torch.bool and valid.ndim == 1
    return valid if is_mask else None


def replace_tensors(batch: Any, *replacements: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Return a batch with some tensors replaced, given as pairs (old, new). The given batch does not change."""
    new_by_id = {id(old): new for old, new in replacements}
    return map_tensors(batch, lambda tensor: new_by_id.get(id(tensor), tensor))


def _find_by_default(batch: Any) -> Any:
    value = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else batch
    if not isinstance(value, Mapping):
        return None if value is batch else value
    keys = [key for key in value if isinstance(key, str) and "label" in key.lower()]
    exact = [key for key in keys if key.lower() == "labels"]
    return value[(exact or keys)[0]] if keys else None
