"""Functions that collate samples to a batch, as torch does or with user code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from shardio.datasets import ImageFolder, RaggedTensor, ShardDataset, ShardMapDataset, decode_samples, mark_valid
from shardio.decoding import FieldDecoder, find_wide
from shardio.order import Words, derive_rng_key, make_rng_key
from shardio.reading import StoredSamples
from shardio.transforms import Calls, Generators, Ragged


def yields_images(dataset: Any) -> bool:
    """Return whether a dataset is one of shardio's, or torch's Subset or ConcatDataset of them."""
    if isinstance(dataset, Subset):
        return yields_images(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(yields_images, dataset.datasets))
    return isinstance(dataset, ShardDataset | ShardMapDataset | ImageFolder)


def collate_channels_last(samples: Sequence[Any]) -> Any:
    """Collate samples as torch does, except that uint8 images become a channels_last tensor [N, 3, H, W].

    Raises:
        ValueError: If images differ in size, or dicts in their keys.
        RuntimeError: If arrays differ in shape.
    """
    first = samples[0]
    if isinstance(first, dict) and (other := next((each for each in samples if each.keys() != first.keys()), None)):
        raise ValueError(f"the samples of a batch have different keys, {list(first)} and {list(other)}")
    return collate_column(samples)


def collate_column(values: Sequence[Any]) -> Any:
    """Collate the values of one field, as :func:`collate_channels_last` does.

    Args:
        values: The values. As in torch, strings are returned as this sequence itself: a list if samples are strings or
            dicts, a tuple if they are tuples.
    """
    try:
        functions: Any = {
            **default_collate_fn_map,
            torch.Tensor: _collate_tensors,
            Ragged: _list_tensors,
            RaggedTensor: _list_tensors,
        }
        return collate(values, collate_fn_map=functions)
    except Exception as error:
        _explain(values, error)
        raise


def _collate_tensors(values: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    if not _is_image(values[0]):
        try:
            collated: torch.Tensor = default_collate_fn_map[torch.Tensor](values, collate_fn_map=collate_fn_map)
        except RuntimeError as error:
            if len({tuple(value.shape) for value in values}) == 1:
                raise
            raise RuntimeError(
                f"{error}. The arrays of a batch differ in shape: give the dataset a transform that makes them alike, "
                "such as RandomResizedCrop(224) in a Compose with fields for masks, or pass a collate_fn that does not "
                "stack them"
            ) from error
        return collated
    sizes = sorted({tuple(image.shape[1:]) for image in values})
    if len(sizes) > 1:
        raise ValueError(
            f"the images of a batch differ in size (height, width), such as {sizes[0]} and {sizes[1]}: give the "
            "dataset a transform that returns images of one size, such as RandomResizedCrop(224)"
        )
    # Stack [3, H, W] views of [H, W, 3] memory in that memory layout, then view the result as [N, 3, H, W].
    # Use numpy, because torch.stack would start threads that compete with those of other workers.
    return torch.from_numpy(np.stack([image.permute(1, 2, 0).numpy() for image in values])).permute(0, 3, 1, 2)


def _list_tensors(values: Sequence[Ragged | RaggedTensor], *, collate_fn_map: Any = None) -> list[torch.Tensor]:
    # Also if the values are equally long: each batch then holds the same types.
    return [
        value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
        for value in values
    ]


def _is_image(value: torch.Tensor) -> bool:
    return value.dtype == torch.uint8 and value.ndim == 3 and value.shape[0] == 3


def _explain(samples: Sequence[Any], error: Exception) -> None:
    """Raise an error that names the sample that cannot be collated, if it is known."""
    for row, sample in enumerate(samples):
        for value in sample.values() if isinstance(sample, dict) else sample if type(sample) is tuple else [sample]:
            if value is None:
                raise TypeError(
                    f"sample {row} of a batch has None as a value, which a tensor cannot hold: pass transform_sample= "
                    "or collate_fn= that replaces it"
                ) from error
            if (wide := find_wide(value)) is not None:
                raise ValueError(
                    f"sample {row} of a batch holds the integer {wide}, which does not fit in 64 bits (signed), "
                    "so a tensor cannot hold it: store it as a string, or pass a collate_fn that does not convert it"
                ) from error


class Collation:
    """A maker of batches from stored samples with user code. Worker processes receive it with their setup.

    Args:
        collate_fn: The user's function, or the loader's own, if only ``transform_sample`` is user code.
        is_seeded: Whether the first sample's rng key seeds the generators that the function draws from.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], *, is_seeded: bool) -> None:
        self.collate_fn = collate_fn
        self._is_seeded = is_seeded
        self._generators: Generators | None = None

    def decode(self, decoder: FieldDecoder, stored: StoredSamples, rng_keys: Words, calls: Calls) -> list[Any]:
        """Return the samples that the dataset itself would yield."""
        return decode_samples(decoder, stored, rng_keys, calls)

    def collate(self, samples: Sequence[Any], rng_keys: Words, valid: NDArray[np.bool_] | None) -> tuple[Any, float]:
        """Return the batch, and the time that the function took, in seconds.

        Args:
            samples: n samples.
            rng_keys: uint64 [n], the rng keys of the samples.
            valid: bool [n], the marks of ``remainder="mask"``; None if samples are not marked.
        """
        if valid is not None:
            samples = [mark_valid(sample, is_valid) for sample, is_valid in zip(samples, valid.tolist(), strict=True)]
        if self._is_seeded and self._generators is None:
            self._generators = Generators([self.collate_fn])
        calls = Calls(self._generators)
        own_key = derive_rng_key(rng_keys[:1], make_rng_key(0, "collate"))
        (batch,) = calls.call([lambda _: self.collate_fn(list(samples))], [None], own_key)
        return batch, calls.elapsed_s

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generators": None}
