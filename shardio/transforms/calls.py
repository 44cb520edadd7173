"""Calls of people's own callables with the images of a chunk, one image at a time."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from shardio.images import DecoderName
from shardio.interruptions import no_end
from shardio.order import Words
from shardio.transforms import foreign
from shardio.transforms.generators import Generators, borrowed_generators


class Calls:
    """The calls of people's own callables for a chunk.

    Args:
        generators: The generators to seed from each image's rng key; None to leave them as they are.

    Attributes:
        elapsed_s: How long the calls took, in seconds.
        decoder_names: The decoder of each image, as far as they are rendered.
        failed_row: The row of the image with which a callable raised an error; None if none did.
    """

    def __init__(self, generators: Generators | None = None) -> None:
        self._generators = generators
        self.elapsed_s = 0.0
        self.decoder_names: list[DecoderName] = []
        self.failed_row: int | None = None

    def call(self, callables: Sequence[Callable[..., Any]], images: Iterable[Any], rng_keys: Words) -> list[Any]:
        """Return each image after all callables, one after the other.

        Args:
            callables: Transforms of other libraries and functions.
            images: n images.
            rng_keys: uint64 [n]. All callables draw from the generators that an image's rng key seeds.
        """
        results, self.failed_row = list[Any](), None
        with nullcontext() if self._generators is None else borrowed_generators():
            for image, rng_key in zip(images, rng_keys.tolist(), strict=True):
                began = time.perf_counter()
                try:
                    results.append(self._call_with_seed(callables, image, rng_key))
                except BaseException as error:  # The caller adds the sample to it.
                    self.failed_row = len(results)
                    if isinstance(error, StopIteration):  # It would silently end an epoch.
                        raise no_end(error) from error
                    raise
                finally:
                    self.elapsed_s += time.perf_counter() - began
        return results

    def _call_with_seed(self, callables: Sequence[Callable[..., Any]], image: Any, rng_key: int) -> Any:
        if self._generators is None:
            return _call_all(callables, image)
        original = None if "torch" in sys.modules else copy.deepcopy(image)
        self._generators.seed(rng_key)
        result = _call_all(callables, image)
        if original is None or "torch" not in sys.modules:
            return result
        # A callable has just imported torch, and may have drawn from a generator that had no seed.
        self._generators.seed(rng_key)
        return _call_all(callables, original)


def _call_all(callables: Sequence[Callable[..., Any]], image: Any) -> Any:
    for each in callables:
        image = foreign.call(each, image)
    return image
