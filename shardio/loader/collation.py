"""Batches that take people's own code: made from whole samples, by the process that decodes these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardio.datasets import decode_samples, mark_valid
from shardio.decoding import FieldDecoder
from shardio.order import Words, derive_rng_key, make_rng_key
from shardio.reading import StoredSamples
from shardio.transforms import Calls, Generators


class Collation:
    """The way from stored samples to a batch that ``collate_fn`` makes. Worker processes receive it with their setup.

    Args:
        collate_fn: The user's function, or the loader's own, if only ``transform_sample`` is the user's.
        is_seeded: Whether the first sample's rng key seeds the generators that it draws from.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], *, is_seeded: bool) -> None:
        self.collate_fn = collate_fn
        self._is_seeded = is_seeded
        self._generators: Generators | None = None

    def decode(self, decoder: FieldDecoder, stored: StoredSamples, rng_keys: Words, calls: Calls) -> list[Any]:
        """Return the samples that the dataset itself would yield."""
        return decode_samples(decoder, stored, rng_keys, calls)

    def collate(self, samples: Sequence[Any], rng_keys: Words, valid: NDArray[np.bool_] | None) -> tuple[Any, float]:
        """Return the batch, and how long the function took, in seconds.

        Args:
            samples: n samples.
            rng_keys: uint64 [n], those of the samples.
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
