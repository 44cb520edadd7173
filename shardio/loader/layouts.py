"""How much is made at a time, and what of it lies in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardio.loader.memory import Layout
from shardio.loader.messages import Column

MIN_CHUNK = 8
"""Samples with arrays that are made together at the least: a chunk costs something, however few it has."""

DEFAULT_PREFETCH = 2
"""Batches that are made ahead: one to take at any time, one to work on."""

MIN_FIXED_BYTES = 4096
"""Smaller items than this travel beside the slot, unless they are images: a user who keeps only them keeps no slot."""


class Unsaid(int):
    """A ``prefetch_factor`` that nobody said: torch puts its own default there, which counts for its own workers.

    A number of its own kind, since frameworks make loaders again from the attributes of others.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is made at a time.

    Attributes:
        num_threads: How many chunks are made at a time.
        chunk_size: Samples that may be decoded together.
        prefetch: Batches that are made ahead, by all workers together, if the user says.
    """

    num_threads: int
    chunk_size: int
    prefetch: int | None

    def num_parts(self, num_samples: int, layout: Layout | None) -> int:
        """Return in how many chunks a batch is made: equally many for each thread, so that none waits for another."""
        if layout is None:
            return 1
        rounds = -(-num_samples // (self.num_threads * self.chunk_size))
        return max(min(self.num_threads * rounds, num_samples // MIN_CHUNK), -(-num_samples // self.chunk_size), 1)

    def num_ahead(self, layout: Layout | None) -> int:
        """Return how many batches are made, or wait to be taken, at a time: each thread finds two chunks."""
        if self.prefetch is not None:
            return self.prefetch
        num_parts = 1 if layout is None else self.num_parts(layout.num_rows, layout)
        return max(DEFAULT_PREFETCH, -(-2 * self.num_threads // num_parts))


def lay_out(names: Sequence[str], sample: Sequence[Column], num_rows: int) -> Layout | None:
    """Return how batches lie in slots, by the columns of one sample; None if nothing is large and of fixed size."""
    columns = {
        place: (values[0].dtype.str, values[0].shape)
        for place, (name, values) in enumerate(zip(names, sample, strict=True))
        if isinstance(values, list) and _is_fixed(name, values[0])
    }
    return Layout(num_rows=num_rows, columns=columns) if columns else None


def _is_fixed(name: str, value: object) -> bool:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc" or not value.dtype.isnative:
        return False
    return name == "image" or value.nbytes >= MIN_FIXED_BYTES
