"""How much is made at a time, and what of it lies in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardio.loader.memory import Layout
from shardio.loader.messages import Column

MIN_CHUNK = 8
"""Samples with arrays that are made together at the least: a chunk costs something, however few it has."""

MIN_FIXED_BYTES = 4096
"""Smaller items travel beside the slot: a user who keeps only them shall not keep the slot for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is made at a time.

    Attributes:
        batch_size: Samples of a full batch.
        num_threads: How many chunks are made at a time.
        chunk_size: Samples that may be decoded together.
        prefetch: Batches that are made ahead, by all workers together.
    """

    batch_size: int
    num_threads: int
    chunk_size: int
    prefetch: int

    def num_parts(self, num_samples: int, layout: Layout | None) -> int:
        """Return in how many chunks a batch is made: equally many for each thread, so that none waits for another."""
        if layout is None:
            return -(-num_samples // max(self.batch_size, 1))
        rounds = -(-num_samples // (self.num_threads * self.chunk_size))
        return max(min(self.num_threads * rounds, num_samples // MIN_CHUNK), -(-num_samples // self.chunk_size), 1)

    def num_ahead(self, layout: Layout | None) -> int:
        """Return how many batches are made, or wait to be taken, at a time: each thread finds two chunks."""
        return max(self.prefetch, -(-2 * self.num_threads // self.num_parts(self.batch_size, layout)))


def lay_out(sample: Sequence[Column], num_rows: int) -> Layout | None:
    """Return how batches lie in slots, by the columns of one sample; None if nothing is large and of fixed size."""
    columns = {
        place: (values[0].dtype.str, values[0].shape)
        for place, values in enumerate(sample)
        if isinstance(values, list) and len(values) == 1 and _is_fixed(values[0])
    }
    return Layout(num_rows=num_rows, columns=columns) if columns else None


def _is_fixed(value: object) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype.kind in "biufc"
        and value.dtype.isnative
        and value.nbytes >= MIN_FIXED_BYTES
    )
