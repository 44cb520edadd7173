"""Batches in flight, and how the outcomes of their chunks change them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

import numpy as np

from shardio.bad_samples import BadSamples
from shardio.decoding import FieldDecoder
from shardio.errors import SampleError, Stage, as_sample_error
from shardio.images import DecoderName
from shardio.loader.batch_plans import BatchPlan, SampleSource
from shardio.loader.collation import Collation
from shardio.loader.executors.chunk_sizing import ChunkSizing, choose_layout
from shardio.loader.processes.messages import Failed, Made, Outcome
from shardio.loader.slots.memory import Column, Layout
from shardio.loader.slots.slot_pool import Slot
from shardio.loader.stats import Tally


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """A part of a batch, which is made as one chunk."""

    plan: BatchPlan
    row: int
    columns: list[Column] | None = None
    batch: Any = None  # What a collation made.
    num_images_by_decoder: Counter[DecoderName] = field(default_factory=Counter)
    num_tries: Counter[int] = field(default_factory=Counter)  # Of replacements, by row.
    skipped: list[str] = field(default_factory=list)  # Keys.
    num_deaths: int = 0  # Of worker processes that were making only this part.
    is_suspect: bool = False  # It may have killed a worker process.


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """A batch that is being made, or is ready to be taken."""

    slot: Slot | None = None
    parts: list[Part] = field(default_factory=list)
    error: BaseException | None = None
    is_probe: bool = False  # Made to find the layout of batches, not for the user.

    @property
    def is_made(self) -> bool:
        return all(part.columns is not None for part in self.parts)

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.is_made

    @property
    def num_samples(self) -> int:
        return sum(len(part.plan) for part in self.parts)

    @property
    def num_images_by_decoder(self) -> Counter[DecoderName]:
        return sum((part.num_images_by_decoder for part in self.parts), Counter())


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """What all batches of a loader have in common.

    Attributes:
        batch_size: The number of samples in a full batch, if the user set it.
        sizing: How many batches and chunks are made at a time.
        bad_samples: The policy for unreadable samples; None raises their errors.
        pins: Whether batches are copied to torch's pinned memory.
        collation: Makes whole batches where that takes people's own code; None if a batch consists of columns.
    """

    batch_size: int | None
    sizing: ChunkSizing
    bad_samples: BadSamples | None
    pins: bool
    collation: Collation | None = None

    def begin_tally(self, decoder: FieldDecoder, num_workers: int, began: float) -> Tally:
        """Return the counts of an epoch that begins.

        Args:
            decoder: The decoder of its samples.
            num_workers: How many workers there are.
            began: When it began, by ``time.perf_counter``.
        """
        steps = [*decoder.python_steps, *([] if self.collation is None else [self.collation.collate_fn])]
        return Tally(
            num_workers=num_workers,
            began=began,
            in_python=tuple(getattr(step, "__qualname__", type(step).__name__) for step in steps),
            recognised=tuple(map(repr, decoder.replacements)),
        )


def cut_batch(plan: BatchPlan, layout: Layout | None, sizing: ChunkSizing) -> list[Part]:
    """Cut a batch into the parts in which it is made."""
    cuts = np.linspace(0, len(plan), sizing.num_parts(len(plan), layout) + 1).astype(int).tolist()
    return [Part(plan=plan.take(slice(start, stop)), row=start) for start, stop in pairwise(cuts)]


def probe_layout(
    plan: BatchPlan, make: Callable[[Batch], None], source: SampleSource, num_rows: int
) -> tuple[Layout | None, BaseException | None]:
    """Find the layout of batches, given one readable sample.

    Args:
        plan: The plan of a batch.
        make: Makes a probe, which is a batch of one sample.
        source: The source of the samples.
        num_rows: The number of samples in a full batch.

    Returns:
        The layout, or None if no sample of the plan can be read; and the error of the plan's batch, if a probe failed
        for a reason other than its sample.
    """
    for row in range(len(plan)):
        probe = Batch(parts=[Part(plan=plan.take(slice(row, row + 1)), row=0)], is_probe=True)
        make(probe)
        if probe.error is None:
            return choose_layout(source.decoder.column_names, probe.parts[0].columns or [], num_rows), None
        if as_sample_error(probe.error, get_args(Stage)) is None:
            return None, probe.error
        # The policy for bad samples handles this one when its batch is made.
    return None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeHandler:
    """A handler that applies the outcomes of chunks to their batches.

    Attributes:
        source: The source of the samples.
        bad_samples: The policy for unreadable samples; None raises their errors.
        tally: Counts times, replaced samples and skipped samples.
    """

    source: SampleSource
    bad_samples: BadSamples | None
    tally: Tally

    def apply(self, batch: Batch, part: Part, outcome: Outcome) -> bool:
        """Apply a chunk's outcome; return whether to make the part again after a replaced or skipped sample."""
        match outcome:
            case Made():
                part.columns, part.num_images_by_decoder = outcome.columns, outcome.num_images_by_decoder
                part.batch = outcome.batch
                self.tally.times += outcome.times
                return False
            case Failed():
                error = outcome.failure.restore()
                if self.bad_samples is not None and not batch.is_probe:
                    found = self.bad_samples.find(error)
                    if found is not None:
                        return self._replace_or_skip(batch, part, found, self.bad_samples)
                batch.error = error
                return False

    def _replace_or_skip(self, batch: Batch, part: Part, error: SampleError, bad_samples: BadSamples) -> bool:
        row, plan = error.row, part.plan
        index, rng_key, num_tries = int(plan.indices[row]), plan.replacement_rng_keys[row], part.num_tries[row]
        source = self.source
        try:
            other = bad_samples.decide(
                error, index, rng_key, num_tries, epoch=source.epoch, describe=source.dataset.describe
            )
        except SampleError as final:
            batch.error = final
            return False
        if other is None:
            self.tally.num_skipped += 1
            part.skipped.append(error.key or str(index))
            part.plan = plan.take(np.delete(np.arange(len(plan)), row))
        else:
            self.tally.num_replaced += 1
            part.num_tries[row] += 1
            plan.indices[row] = other
        if len(part.plan):
            return True
        part.columns, part.num_images_by_decoder = [], Counter()
        return False
