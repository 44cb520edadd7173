"""How many batches and chunks are made at a time, and which columns are stored in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardio.loader.slots.forms import as_stored
from shardio.loader.slots.memory import Column, Layout

MIN_CHUNK = 8
"""The smallest chunk that a batch is cut into, in samples, because each chunk has a fixed cost."""

DEFAULT_PREFETCH = 2
"""The smallest default number of batches made ahead: one that is ready, and one in progress."""


class DefaultPrefetch(int):
    """A ``prefetch_factor`` that the user did not set: torch's default, which is meant for torch's workers.

    It is a class, so that a loader recognizes it when a framework re-creates the loader from its attributes.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizing:
    """How many batches and chunks are made at a time.

    Attributes:
        num_threads: How many chunks are made at a time.
        chunk_size: How many samples may be decoded together.
        prefetch: How many batches all workers together make ahead; None for the default.
        keeps_whole: Whether each batch is one chunk, because a collation makes it.
    """

    num_threads: int
    chunk_size: int
    prefetch: int | None
    keeps_whole: bool = False

    def num_parts(self, num_samples: int, layout: Layout | None) -> int:
        """Return the number of chunks of a batch: the same for each thread, so that none waits for another."""
        if self.keeps_whole or layout is None or not layout.columns:
            return 1
        rounds = -(-num_samples // (self.num_threads * self.chunk_size))
        return max(min(self.num_threads * rounds, num_samples // MIN_CHUNK), -(-num_samples // self.chunk_size), 1)

    def num_ahead(self, layout: Layout | None) -> int:
        """Return the number of batches to make ahead: by default, enough for two chunks per thread."""
        if self.prefetch is not None:
            return self.prefetch
        num_parts = 1 if layout is None else self.num_parts(layout.num_rows, layout)
        return max(DEFAULT_PREFETCH, -(-2 * self.num_threads // num_parts))

    def num_spare(self, layout: Layout) -> int:
        """Return how many free slots to keep."""
        # The user holds one batch, and the one before it until the next request is answered.
        return self.num_ahead(layout) + 2


def choose_layout(names: Sequence[str], sample: Sequence[Column], num_rows: int) -> Layout:
    """Return the layout of batches in slots, given the columns of one sample.

    Args:
        names: The names of the fields.
        sample: The columns of one sample.
        num_rows: The number of samples in a full batch.
    """
    columns = {
        column_index: (stored.dtype.str, stored.shape)
        for column_index, (name, values) in enumerate(zip(names, sample, strict=True))
        if isinstance(values, list) and (stored := as_stored(name, values[0])) is not None
    }
    return Layout(num_rows=num_rows, columns=columns)
