"""How many batches and chunks are made at a time, and which columns lie in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardio.loader.slots.memory import Column, Layout

MIN_CHUNK = 8
"""The smallest chunk with arrays, in samples: each chunk has a fixed cost."""

DEFAULT_PREFETCH = 2
"""Batches that are made ahead: one to take at any time, one to work on."""

MIN_FIXED_BYTES = 4096
"""Smaller items than this do not lie in the slot, unless they are images: a user who keeps them alone keeps no slot."""


class DefaultPrefetch(int):
    """A ``prefetch_factor`` that the user did not set: torch's default, which is meant for torch's workers.

    An integer class of its own, because frameworks create loaders from the attributes of others.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizing:
    """How many batches and chunks are made at a time.

    Attributes:
        num_threads: How many chunks are made at a time.
        chunk_size: How many samples may be decoded together.
        prefetch: How many batches all workers together make ahead; None lets shardio choose.
    """

    num_threads: int
    chunk_size: int
    prefetch: int | None

    def num_parts(self, num_samples: int, layout: Layout | None) -> int:
        """Return the number of chunks of a batch: equally many for each thread, so that none waits for another."""
        if layout is None or not layout.columns:
            return 1
        rounds = -(-num_samples // (self.num_threads * self.chunk_size))
        return max(min(self.num_threads * rounds, num_samples // MIN_CHUNK), -(-num_samples // self.chunk_size), 1)

    def num_ahead(self, layout: Layout | None) -> int:
        """Return how many batches are in flight or wait to be taken: by default each thread finds two chunks."""
        if self.prefetch is not None:
            return self.prefetch
        num_parts = 1 if layout is None else self.num_parts(layout.num_rows, layout)
        return max(DEFAULT_PREFETCH, -(-2 * self.num_threads // num_parts))

    def num_spare(self, layout: Layout) -> int:
        """Return how many free slots are kept."""
        # One batch is with the user, and the one before it until the user's next request is answered.
        return self.num_ahead(layout) + 2


def choose_layout(names: Sequence[str], sample: Sequence[Column], num_rows: int) -> Layout:
    """Return how batches lie in slots, from the columns of one sample.

    Args:
        names: The names of the fields.
        sample: The columns of one sample.
        num_rows: The samples of a full batch.
    """
    columns = {
        field_index: (values[0].dtype.str, values[0].shape)
        for field_index, (name, values) in enumerate(zip(names, sample, strict=True))
        if isinstance(values, list) and _is_fixed(name, values[0])
    }
    return Layout(num_rows=num_rows, columns=columns)


def _is_fixed(name: str, value: object) -> bool:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc" or not value.dtype.isnative:
        return False
    return name == "image" or value.nbytes >= MIN_FIXED_BYTES
