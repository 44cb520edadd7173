"""The order of a mixture: the source and the sample at each position, the split over ranks, and the state.

The schedule of a mixture is endless, and an epoch is a part of it: the positions from e * N to (e + 1) * N. Each source
has epochs of its own, which follow one another: pick number d of a source of n samples is position d mod n of its epoch
d // n, in its own order. If the mixture ends when every sample has been delivered once (``all-once``), each epoch has
the same schedule, and the epochs of the sources are those of the mixture.

The weights may change. Each phase of constant weights has a :class:`~shardio.order.schedule.Schedule` of its own.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardio.errors import StateError
from shardio.order.epoch_order import EpochOrder, OrderSettings
from shardio.order.schedule import Schedule, count_weights
from shardio.order.split import Split, select_by_strata
from shardio.order.state import STATE_VERSION, Cursor, check_version, find_differences, read_cursor

Stop = Literal["first", "longest", "all-once"]
"""A rule for the end of a mixture's epoch; the alternative is a number of samples."""

Ints = NDArray[np.int64]

MAX_POSITION = 2**47
"""The last position in the schedule at which an epoch may begin, because numbers of samples must fit in int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrder:
    """The order of one source of a mixture.

    Attributes:
        name: The source's name.
        shard_sizes: int64 [shards], the number of samples in each shard.
        settings: The settings of the source's own order.
        digest: The identity of the source's dataset, or "" if it has none.
        repeat: The number of times that the source is delivered before it is exhausted.
    """

    name: str
    shard_sizes: Ints
    settings: OrderSettings
    digest: str
    repeat: int = 1

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch of the source."""
        return int(self.shard_sizes.sum())


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a mixture's schedule with constant weights.

    Attributes:
        start: The pick with which the phase begins.
        schedule: The schedule.
        before: The number of picks from each source before the phase.
    """

    start: int
    schedule: Schedule
    before: tuple[int, ...]

    def count(self, pick: int) -> tuple[int, ...]:
        """Return the number of picks from each source before a pick of this phase."""
        counts = self.schedule.count(pick - self.start)
        return tuple(before + count for before, count in zip(self.before, counts, strict=True))


Weights = Mapping[str, float]
"""The weight of each source by name. A source without a weight is not picked."""


def make_mixed_order(
    sources: Sequence[SourceOrder],
    weights: Weights,
    changes: Sequence[tuple[int, Weights]],
    *,
    stop: Stop | int,
    is_pure: bool,
    global_batch_size: int | None,
    seed: int | None,
) -> MixedOrder:
    """Return the order of a mixture.

    Args:
        sources: The sources.
        weights: The weight of each source.
        changes: The steps at which the weights change, in ascending order, with the new weights.
        stop: When an epoch ends, or the number of samples in an epoch.
        is_pure: Whether the batches of a step come from one source.
        global_batch_size: The number of samples in a step, if ``changes`` or ``is_pure`` needs it.
        seed: The seed of the schedule; None for a regular schedule.

    Raises:
        ValueError: If the weights are invalid or the settings contradict each other.
    """
    if global_batch_size is None and (is_pure or changes):
        what = "batches='pure'" if is_pure else "a change of weights"
        raise ValueError(f"{what} needs global_batch_size, the number of samples in the batches of all ranks")
    if changes and stop == "all-once":
        raise ValueError("stop='all-once' determines when the weights change: use another stop, or do not change them")

    def count(weights: Weights) -> tuple[int, ...]:
        return count_weights([weights.get(source.name, 0) for source in sources])

    size = global_batch_size or 1
    return MixedOrder(
        sources,
        count(weights),
        [(step if is_pure else step * size, count(changed)) for step, changed in changes],
        stop=stop,
        unit=size if is_pure else 1,
        seed=seed,
    )


def weigh_by_size(sources: Sequence[SourceOrder], temperature: float) -> Weights:
    """Return each source's weight: its size times its repetitions, raised to the power ``temperature``."""
    sizes = {source.name: source.num_samples * source.repeat for source in sources}
    return sizes if temperature == 1 else {name: size**temperature for name, size in sizes.items()}


class MixedOrder:
    """The order of a mixture.

    A pick takes ``unit`` consecutive samples from one source: one sample, or a whole batch.

    Args:
        sources: The sources.
        weights: The weight of each source, as integers.
        changes: The picks at which the weights change, in ascending order, with the new weights.
        stop: When an epoch ends, or the number of samples in an epoch.
        unit: The number of samples in a pick.
        seed: The seed of the schedule; None for a regular schedule.

    Attributes:
        num_samples: N, the number of samples in an epoch.
        num_all_samples: The number of samples of all sources.
        starts: int64 [sources], the index of each source's first sample in a consecutive numbering of all samples.

    Raises:
        ValueError: If the epoch would have no end or no samples, or the settings contradict each other.
    """

    def __init__(
        self,
        sources: Sequence[SourceOrder],
        weights: tuple[int, ...],
        changes: Sequence[tuple[int, tuple[int, ...]]],
        *,
        stop: Stop | int,
        unit: int,
        seed: int | None,
    ) -> None:
        self.sources, self.unit, self._seed = tuple(sources), unit, seed
        self._sizes = np.array([source.num_samples for source in sources])
        self._goals = [source.num_samples * source.repeat for source in sources]
        self.starts = np.cumsum(self._sizes) - self._sizes
        self.num_all_samples = int(self._sizes.sum())
        self._restarts = stop == "all-once"
        self.phases = [Phase(0, Schedule(weights, seed), (0,) * len(sources))]
        if self._restarts:
            self._deliver_once()
        for start, changed in changes:
            self.phases.append(Phase(start, Schedule(changed, seed), self._find_phase(start).count(start)))
        self.num_samples = self._find_stop(stop)
        if not self.num_samples:
            raise ValueError("an epoch of the mixture has no samples: a source is too small for its weight")
        self._orders = dict[tuple[int, int], EpochOrder]()

    def count(self, position: int) -> tuple[int, ...]:
        """Return the number of samples of each source before a position, counted from the beginning of epoch 0."""
        pick, rest = divmod(position, self.unit)
        phase = self._find_phase(pick)
        counts = [count * self.unit for count in phase.count(pick)]
        if rest:  # The position is within a batch from one source.
            sources, _ = phase.schedule.locate(np.array([pick - phase.start]))
            counts[int(sources[0])] += rest
        return tuple(counts)

    def weights_at(self, position: int) -> tuple[int, ...]:
        """Return the weights of the sources at a position, counted from the beginning of epoch 0."""
        return self._find_phase(position // self.unit).schedule.weights

    def find(self, source: int, item: int) -> int | None:
        """Return the position of the first sample of a pick from a source, counted from the beginning of epoch 0.

        Args:
            source: The source.
            item: The number of earlier picks from the source.

        Returns:
            The position; None if the source is not picked that often.
        """
        stops = [phase.before[source] for phase in self.phases[1:]]
        phase = self.phases[bisect_right(stops, item)]
        if not phase.schedule.weights[source]:
            return None
        return (phase.start + phase.schedule.find(source, item - phase.before[source])) * self.unit

    def pick(self, epoch: int, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source at each position of an epoch, and the number of earlier samples of that source, int64 [n].

        Args:
            epoch: The epoch of the mixture.
            positions: int64 [n]. Beyond the last position, the order repeats (position p mod N).
        """
        picks, inner = np.divmod(positions % self.num_samples + self._start(epoch), self.unit)
        sources, items = np.empty_like(picks), np.empty_like(picks)
        numbers = np.searchsorted([phase.start for phase in self.phases], picks, side="right") - 1
        for number in np.unique(numbers).tolist():
            rows, phase = numbers == number, self.phases[number]
            sources[rows], items[rows] = phase.schedule.locate(picks[rows] - phase.start)
            items[rows] += np.array(phase.before)[sources[rows]]
        items = items * self.unit + inner
        return sources, items + epoch * np.array(self._goals)[sources] if self._restarts else items

    def samples_at(self, epoch: int, positions: Ints) -> Ints:
        """Return the samples at positions of an epoch: see :meth:`find_samples`."""
        return self.find_samples(*self.pick(epoch, positions))

    def find_samples(self, sources: Ints, items: Ints) -> Ints:
        """Return the samples of some sources, given the number of each source's earlier samples, int64 [n].

        The samples of all sources are numbered, one source after another, and a number includes the source's epoch:
        source epoch * ``num_all_samples`` + the source's first index + the sample's index. So repetitions have
        different numbers, and therefore different random transforms.
        """
        epochs, own = np.divmod(items, self._sizes[sources])
        samples = np.empty_like(own)
        pairs = sources * (int(epochs.max(initial=0)) + 1) + epochs
        for pair in np.unique(pairs).tolist():
            rows = pairs == pair
            first = np.argmax(rows)
            samples[rows] = self._find_order(int(sources[first]), int(epochs[first])).samples_at(own[rows])
        indices: Ints = epochs * self.num_all_samples + self.starts[sources] + samples
        return indices

    def split_index(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return the source of each result of :meth:`samples_at`, and the sample's index in that source, int64 [n]."""
        samples = indices % self.num_all_samples
        sources = np.searchsorted(self.starts, samples, side="right") - 1
        return sources, samples - self.starts[sources]

    def select(self, epoch: int, start: int, stop: int, places: Ints) -> tuple[Ints, Ints]:
        """Return one rank's samples of a step, in the form that :meth:`pick` returns.

        The samples of each source are sorted by their strata. Then all sources are merged so that each run of samples
        has the same mixture: sample number j of a source's n samples has the sort key (j + 1/2) / n. A rank takes a
        run, so it reads neighboring samples of each source. The time does not depend on the number of ranks.

        Args:
            epoch: The epoch of the mixture.
            start: The step's first position.
            stop: The end of the step's positions, at most the end of the epoch.
            places: int64 [n], consecutive places in the merged order.
        """
        if not len(places):
            return places, places
        begin = self._start(epoch)
        first, last = (np.array(self.count(begin + position), np.int64) for position in (start, stop))
        counts = last - first
        if self._restarts:
            first = first + epoch * np.array(self._goals)
        lows, highs = (_count_merged(counts, place) for place in (int(places[0]), int(places[-1]) + 1))
        sources, items, keys = list[Ints](), list[Ints](), list[NDArray[np.float64]]()
        for source in np.flatnonzero(highs > lows).tolist():
            own = np.arange(lows[source], highs[source])
            sources.append(np.full(len(own), source, np.int64))
            items.append(self._sort_items(source, int(first[source]), int(counts[source]), own))
            keys.append((own + 0.5) / counts[source])
        order = np.argsort(np.concatenate(keys), kind="stable")
        return np.concatenate(sources)[order], np.concatenate(items)[order]

    def _sort_items(self, source: int, first: int, count: int, places: Ints) -> Ints:
        # In each of a source's epochs, sort its items by their strata; return the items at ``places``.
        size, settings, found = int(self._sizes[source]), self.sources[source].settings, list[Ints]()
        start = 0
        while start < count:
            epoch, position = divmod(first + start, size)
            stop = min(start + size - position, count)
            own = places[(places >= start) & (places < stop)] - start
            if len(own):
                found.append(epoch * size + select_by_strata(position, stop - start, own, settings.strata))
            start = stop
        return np.concatenate(found)

    def dump(self, cursor: Cursor) -> dict[str, Any]:
        """Return the state of a run that has reached ``cursor``: the values that determined its samples."""
        now = self._start(cursor.epoch) + cursor.position
        # With "all-once", the first weights determine the others.
        phases = self.phases[:1] if self._restarts else self.phases
        begun = [phase for phase in phases if phase.start * self.unit < now] or phases[:1]
        picked = np.flatnonzero(np.array([phase.schedule.weights for phase in begun]).any(axis=0)).tolist()
        digest = hashlib.blake2b(digest_size=8)
        for source in (self.sources[number] for number in picked):
            digest.update(f"{source.name}\0{source.digest}\0{source.num_samples}\0{source.settings}\n".encode())
        weights = [[phase.start * self.unit, [phase.schedule.weights[number] for number in picked]] for phase in begun]
        mixture = {
            "seed": self._seed,
            "unit": self.unit,
            "sources": [self.sources[number].name for number in picked],
            "digest": digest.hexdigest(),
            "weights": weights,
        }
        if cursor.epoch or self._restarts:
            mixture["samples"] = self.num_samples
        return {"version": STATE_VERSION, "epoch": cursor.epoch, "position": cursor.position, "mixture": mixture}

    def read(self, state: Any) -> Cursor:
        """Check that a state's mixture equals this one up to the state's position, and return the state's cursor.

        After the state's position, weights may change, and sources may be added or removed.

        Raises:
            StateError: If the state belongs to another mixture; the message names the differences.
        """
        check_version(state)
        cursor = read_cursor(state, self.num_samples)
        if differences := find_differences(state.get("mixture"), self.dump(cursor)["mixture"]):
            raise StateError(
                f"the state belongs to another mixture ({differences}): create the mixture as it was up to this point, "
                "and change its weights and sources from here on with at()"
            )
        return cursor

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_orders": {}}

    def _start(self, epoch: int) -> int:
        start = 0 if self._restarts else epoch * self.num_samples
        if max(start, epoch * max(self._goals)) > MAX_POSITION:
            raise ValueError(f"epoch {epoch} of a mixture of {self.num_samples:,} samples is out of range")
        return start

    def _find_phase(self, pick: int) -> Phase:
        return self.phases[bisect_right(self.phases, pick, key=lambda phase: phase.start) - 1]

    def _find_order(self, source: int, epoch: int) -> EpochOrder:
        if (order := self._orders.get((source, epoch))) is None:
            if len(self._orders) > 4 * len(self.sources):  # Only consecutive epochs are in use.
                self._orders.clear()
            order = EpochOrder(self.sources[source].shard_sizes, self.sources[source].settings, epoch)
            self._orders[source, epoch] = order
        return order

    def _deliver_once(self) -> None:
        # A source leaves the mixture after its last sample, and the others keep their proportions.
        if self.unit > 1:
            raise ValueError("stop='all-once' needs batches='mixed', because a source may not fill its last batch")
        if 0 in self.phases[0].schedule.weights:
            raise ValueError("stop='all-once' needs a positive weight for each source")
        while True:
            phase = self.phases[-1]
            weights, schedule = np.array(phase.schedule.weights), phase.schedule
            if np.count_nonzero(weights) == 1:
                return
            last_items = {
                source: self._goals[source] - phase.before[source] - 1 for source in np.flatnonzero(weights).tolist()
            }
            windows = {source: schedule.window(source, item) for source, item in last_items.items()}
            latest = min(last for _, last in windows.values())
            candidates = [source for source, (first, _) in windows.items() if first <= latest]
            stop = phase.start + 1 + min(schedule.find(source, last_items[source]) for source in candidates)
            before = phase.count(stop)
            rest = np.where(np.array(before) < np.array(self._goals), weights, 0)
            self.phases.append(Phase(stop, Schedule(tuple(rest.tolist()), self._seed), before))

    def _find_stop(self, stop: Stop | int) -> int:
        # Return the number of samples in an epoch.
        if isinstance(stop, int):
            if stop % self.unit:
                raise ValueError(f"stop={stop} is not a multiple of the global batch size, {self.unit}")
            return stop
        if stop == "all-once":
            return sum(self._goals)
        ends = [phase.start for phase in self.phases[1:]]
        for phase, end in zip(self.phases, [*ends, None], strict=True):
            picks = [self._picks_until(stop, phase, source) for source in range(len(self.sources))]
            known = [each for each in picks if each is not None]
            if stop == "longest" and len(known) < len(picks):
                continue
            found = phase.start + (min(known) if stop == "first" else max(known))
            if end is None or found <= end:
                return found * self.unit
        raise ValueError(f"stop={stop!r} is never reached, because a source has the weight 0: set stop to a number")

    def _picks_until(self, stop: Stop, phase: Phase, source: int) -> int | None:
        # The number of picks in the phase until the source would repeat (first) or is fully delivered (longest).
        goal, weight = self._goals[source], phase.schedule.weights[source]
        left = (goal // self.unit if stop == "first" else -(-goal // self.unit)) - phase.before[source]
        if left <= 0 and stop == "longest":
            return 0
        if not weight:
            return None
        total = sum(phase.schedule.weights)
        return max(left, 0) * total // weight if stop == "first" else -(-left * total // weight)


def _count_merged(counts: Ints, place: int) -> Ints:
    """Return the number of each source's samples before a place in the merged order, int64 [sources].

    Args:
        counts: int64 [sources], the number of samples of each source in the step.
        place: The place, from 0 to the sum of ``counts``.
    """
    lows, highs = np.zeros_like(counts), counts.copy()
    is_later = np.tri(len(counts), k=-1, dtype=np.int64)  # Among equal sort keys, that of the first source comes first.
    own = np.maximum(counts, 1)[:, None]
    while (lows < highs).any():
        middles = (lows + highs) // 2
        # Sample (i, j) follows each (m, l) where (2l + 1) * n_i < (2j + 1) * n_m, or these are equal and m < i.
        scaled = (2 * middles + 1)[:, None] * counts
        before = np.clip((scaled - own - 1 + is_later) // (2 * own) + 1, 0, counts)
        is_before = (before.sum(axis=1) < place) & (lows < highs)
        lows, highs = np.where(is_before, middles + 1, lows), np.where(is_before | (lows >= highs), highs, middles)
    return lows


ITEM_BITS = 48
"""The number of bits for each item in an encoded pick."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSplit(Split):
    """One rank's share of an epoch of a mixture: every rank's batches mix the sources in the step's proportions.

    In place of positions, batches contain encoded picks: source * 2**48 + the number of the source's earlier samples,
    or its bitwise complement for repeats.

    Attributes:
        order: The order of the mixture.
        epoch: The epoch.
    """

    order: MixedOrder = field(compare=False)
    epoch: int

    def batch(self, step: int) -> Ints:
        start, stop = self._step(step)
        first, count = self._share(stop - start)
        places = np.arange(first, first + count, dtype=np.int64)
        if self.world_size == 1:
            return self._encode(start + places)
        end = min(stop, self.num_samples)
        sources, items = self.order.select(self.epoch, start, end, places[places < end - start])
        return np.concatenate([sources << ITEM_BITS | items, self._encode(start + places[places >= end - start])])

    def batches(self, steps: Sequence[int]) -> list[Ints]:
        if self.world_size > 1 or not steps:
            return [self.batch(step) for step in steps]
        batches = [np.arange(*self._step(step), dtype=np.int64) for step in steps]
        return np.split(self._encode(np.concatenate(batches)), np.cumsum([len(batch) for batch in batches])[:-1])

    def find_valid(self, positions: Ints) -> NDArray[np.bool_] | None:
        return positions >= 0 if self.remainder_policy.marks_repeats else None

    def _encode(self, positions: Ints) -> Ints:
        sources, items = self.order.pick(self.epoch, positions)
        picks = sources << ITEM_BITS | items
        return np.where(positions < self.num_samples, picks, ~picks)


def decode_picks(picks: Ints) -> tuple[Ints, Ints]:
    """Return the source of each encoded pick, and the number of earlier samples of that source, int64 [n] each."""
    picks = np.where(picks < 0, ~picks, picks)
    return picks >> ITEM_BITS, picks & ((1 << ITEM_BITS) - 1)
