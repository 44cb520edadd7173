"""Delivery: an epoch's batches in their order, made a few ahead by whoever is free."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from shardio.datasets.bad_samples import BadSamples
from shardio.device.batches import map_tensors
from shardio.errors import SampleError
from shardio.interruptions import let_through
from shardio.loader.agenda import Agenda
from shardio.loader.assembly import assemble_batch
from shardio.loader.batches import BatchPlan
from shardio.loader.crews import Crew
from shardio.loader.deaths import MAX_DEATHS, Death, blame, cannot_start, warn_of
from shardio.loader.ending import before_the_end
from shardio.loader.layouts import Sizes, lay_out
from shardio.loader.messages import Failed, Made, Outcome, Unreadable
from shardio.loader.pending import Batch, Part, sort_slots
from shardio.loader.source import Source
from shardio.loader.stats import Tally
from shardio.torch_modes import own_tensors

SUPERSEDED = (
    "this iterator ended when the loader was iterated again: with persistent_workers=True there is one at a time. Use "
    "persistent_workers=False, or a second loader"
)


class Delivery:
    """An epoch's batches, made and taken one after another.

    Args:
        source: What they consist of.
        plans: Which samples each of them has.
        batch_size: Samples of a full batch, if the user says.
        crew: Makes them; nobody else uses it meanwhile.
        sizes: How much is made at a time.
        bad_samples: Decides on what cannot be read; None for an error.
        timeout_s: How long to wait for a batch at the most; 0 for ever.
        tally: Counts.
        closes_crew: Whether the crew ends with the delivery.
        pins: Whether batches go to torch's pinned memory.
    """

    def __init__(
        self,
        source: Source,
        plans: Iterator[BatchPlan],
        batch_size: int | None,
        crew: Crew,
        sizes: Sizes,
        bad_samples: BadSamples | None,
        timeout_s: float,
        tally: Tally,
        *,
        closes_crew: bool,
        pins: bool,
    ) -> None:
        self._source, self._plans, self._batch_size, self._crew, self._sizes = source, plans, batch_size, crew, sizes
        self._bad_samples, self._timeout_s, self._tally = bad_samples, timeout_s, tally
        self._closes_crew, self._pins = closes_crew, pins
        self._is_open = True
        self._superseded = False
        self._batches: deque[Batch] = deque()  # In their order; the first is the next to be taken.
        self._agenda = Agenda(crew, source.locate, tally.began)
        self._num_failed_starts = 0

    def check(self) -> None:
        """Raise RuntimeError if no batch must be asked for any more."""
        if self._superseded:
            raise RuntimeError(SUPERSEDED)
        if not self._crew.is_here():
            raise RuntimeError("this iterator belongs to the process that this one was forked from: iterate again")
        self._source.check()

    def take(self) -> Any:
        """Return the next batch, or Failed in its place.

        Raises:
            StopIteration: If there is none.
            RuntimeError: If none came within the timeout.
            WorkerError: If hosts cannot start.
        """
        self.check()
        began = time.perf_counter()
        try:
            with before_the_end(), own_tensors():
                batch = self._take()
                made = self._assemble(batch)
            if batch.error is not None:
                return Failed(serial=0, error=batch.error, traceback=None)
            self._tally.count_batch(batch.num_samples, batch.num_images_by_decoder, time.perf_counter() - began)
            return made
        except StopIteration:
            self.close()
            if self._bad_samples is not None:
                self._bad_samples.warn(self._tally.num_replaced + self._tally.num_skipped, self._source.epoch)
            raise
        except BaseException:  # Ctrl-C as well may have interrupted the crew anywhere: the next epoch gets another.
            self._closes_crew = True
            self.close()
            raise

    def close(self, *, superseded: bool = False) -> None:
        """Stop; what was made and not taken is thrown away.

        Args:
            superseded: Whether somebody else gets the crew now, so that to be asked for more is a mistake.
        """
        if not self._is_open:
            return
        self._is_open, self._superseded = False, superseded
        if not self._crew.is_here():
            return
        if self._closes_crew:
            self._crew.close()
        else:
            self._crew.cancel()
            self._crew.give_up(*sort_slots(self._batches))
        self._batches.clear()
        self._agenda.clear()

    def __del__(self) -> None:
        if hasattr(self, "_num_failed_starts"):
            self.close()

    def _take(self) -> Batch:
        """Return the next batch once it is made, or cannot be, and have another one begun.

        Raises:
            StopIteration: If there is none.
        """
        self._top_up()
        if not self._batches:
            raise StopIteration
        batch = self._batches[0]
        self._wait_for(batch)
        self._batches.popleft()
        if batch.error is not None:
            self._crew.give_up(*sort_slots([batch]))
            self._agenda.drop(batch)
        if self._crew.works_ahead:
            self._top_up()  # Before the user computes: the crew shall not run dry meanwhile.
        return batch

    def _top_up(self) -> None:
        """Begin as many batches as are made ahead."""
        while len(self._batches) < self._num_ahead and (plan := self._draw()) is not None:
            if not self._crew.is_laid_out:
                self._lay_out(plan)
            layout = self._crew.layout
            if layout is not None and len(plan) > layout.num_rows:
                layout = replace(layout, num_rows=len(plan))
                self._crew.lay_out(layout, self._sizes.num_ahead(layout))
            batch = Batch(slot=None if layout is None else self._crew.take())
            cuts = np.linspace(0, len(plan), self._sizes.num_parts(len(plan), layout) + 1).astype(int).tolist()
            for start, stop in pairwise(cuts):
                batch.parts.append(Part(plan=plan.take(slice(start, stop)), row=start))
            self._batches.append(batch)
            self._agenda.add(batch, batch.parts)

    @property
    def _num_ahead(self) -> int:
        return self._sizes.num_ahead(self._crew.layout) if self._crew.works_ahead else 1

    def _draw(self) -> BatchPlan | None:
        """Return the samples of the next batch that is not begun, if there is one."""
        try:
            return next(self._plans, None)
        except Exception as error:  # A user's sampler failed: that is told after the batches that it gave, ever after.
            let_through(error)
            self._plans = iter(partial(_raise, error), None)
            self._batches.append(Batch(slot=None, error=error))
            return None

    def _lay_out(self, plan: BatchPlan) -> None:
        """Find out, by a sample that can be read, what is of fixed size."""
        for place in range(len(plan)):
            probe = Batch(slot=None, is_probe=True)
            probe.parts.append(Part(plan=plan.take(slice(place, place + 1)), row=0))
            self._agenda.add(probe, probe.parts)
            self._wait_for(probe)
            if isinstance(probe.error, SampleError):
                continue  # What becomes of it is decided when its batch is made.
            if probe.error is not None:
                raise probe.error
            layout = lay_out(self._source.decoder.names, probe.parts[0].columns or [], self._batch_size or len(plan))
            self._crew.lay_out(layout, self._sizes.num_ahead(layout))
            return

    def _wait_for(self, batch: Batch) -> None:
        """Wait until a batch is made, or cannot be."""
        deadline = time.monotonic() + self._timeout_s if self._timeout_s else None
        while not batch.is_made and batch.error is None:
            self._agenda.submit()
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise RuntimeError(
                    f"no batch came within timeout={self._timeout_s} s: increase it or check the storage"
                )
            for news in self._crew.receive(left_s):
                if isinstance(news, Death):
                    self._make_again(news)
                elif (asked := self._agenda.pop(news.serial)) is not None:
                    self._note(*asked, news)

    def _note(self, batch: Batch, part: Part, outcome: Outcome) -> None:
        self._num_failed_starts = 0
        if isinstance(outcome, Failed | Unreadable):
            outcome.explain()
        match outcome:
            case Made():
                part.columns, part.num_images_by_decoder = outcome.columns, outcome.num_images_by_decoder
                self._tally.times += outcome.times
            case Failed():
                batch.error = outcome.error
            case Unreadable() if self._bad_samples is None or batch.is_probe:
                batch.error = outcome.error
            case Unreadable():
                self._resolve(batch, part, outcome.error, self._bad_samples)

    def _resolve(self, batch: Batch, part: Part, problem: SampleError, bad_samples: BadSamples) -> None:
        """Go on with another sample, or with one less, or not at all."""
        place, plan = problem.row, part.plan
        number, replacement_rng_key, num_tries = (
            int(plan.numbers[place]),
            plan.replacement_rng_keys[place],
            part.num_tries[place],
        )
        source = self._source
        try:
            other = bad_samples.decide(
                problem, number, replacement_rng_key, num_tries, epoch=source.epoch, describe=source.describe
            )
        except SampleError as error:
            batch.error = error
            return
        if other is None:
            self._tally.num_skipped += 1
            part.skipped.append(problem.key or str(number))
            part.plan = plan.take(np.delete(np.arange(len(plan)), place))
        else:
            self._tally.num_replaced += 1
            part.num_tries[place] += 1
            plan.numbers[place] = other
        if len(part.plan):
            self._agenda.add(batch, [part])
        else:
            part.columns, part.num_images_by_decoder = [], Counter()

    def _make_again(self, death: Death) -> None:
        """After a host died: have everything made again that is not there, in other slots.

        Who was at work when it died is made alone first. If that kills a host, too, there is no doubt who did it.
        """
        self._tally.num_host_deaths += death.num_hosts
        self._crew.renew(*sort_slots(self._batches))
        self._num_failed_starts = 0 if death.was_ready else self._num_failed_starts + 1
        if self._num_failed_starts == MAX_DEATHS:
            raise cannot_start(death)
        is_fatal = False
        for batch, part in self._agenda.find(death.at_work):
            part.is_suspect = True
            part.num_deaths += death.was_ready and len(death.at_work) == 1
            if part.num_deaths == MAX_DEATHS:
                keys = [self._source.describe(number)[0] for number in part.plan.numbers.tolist()]
                batch.error, is_fatal = blame(keys, death), True
        again = []
        for batch in self._agenda.clear():
            if batch.error is None:
                batch.slot = None if batch.slot is None else self._crew.take()
                for part in batch.parts:
                    if len(part.plan):
                        part.columns = None  # What is made lies in the old slot, which not all hosts know.
                        again.append((batch, part))
        for batch, part in sorted(again, key=lambda asked: not asked[1].is_suspect):
            self._agenda.add(batch, [part])
        if not is_fatal:  # Else an error says it.
            warn_of(death)

    def _assemble(self, batch: Batch) -> Any:
        """Return what the user gets, or note why there is nothing to get."""
        if batch.error is None:
            try:
                views = {} if batch.slot is None else self._crew.hand_out(batch.slot)
                joined = assemble_batch(self._source.decoder, batch, views)
                return map_tensors(joined, torch.Tensor.pin_memory) if self._pins else joined
            except Exception as error:
                let_through(error)
                batch.error = error
        return None


def _raise(error: Exception) -> None:
    raise error
