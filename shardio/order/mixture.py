"""The order of a mixture: positions to sources and their samples, the split over ranks, and the state.

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
from shardio.order.epoch_order import EpochOrder, OrderSettings, reverse_bits
from shardio.order.schedule import Schedule, count_weights
from shardio.order.split import Split
from shardio.order.state import STATE_VERSION, Cursor, check_version, find_differences, read_cursor

Stop = Literal["first", "longest", "all-once"]
"""The end of a mixture's epoch, if it is not a number of samples."""

Ints = NDArray[np.int64]

MAX_POSITION = 2**60
"""The position of the schedule up to which epochs may begin: numbers of samples must fit in int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOrder:
    """The order of one source of a mixture.

    Attributes:
        name: The source's name.
        shard_sizes: int64 [shards], the number of samples of each shard.
        settings: The settings of the source's own order.
        digest: The identity of the source's dataset, or "" if it has none.
        repeat: The number of times that the source is delivered until it counts as exhausted.
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
        changes: The steps from which the weights change, in ascending order, with the new weights.
        stop: The end of an epoch, or the number of samples in an epoch.
        is_pure: Whether the batches of a step come from one source.
        global_batch_size: The number of samples in a step, if ``changes`` or ``is_pure`` need it.
        seed: The seed of the schedule; None for a regular one.

    Raises:
        ValueError: If the weights are invalid or the settings contradict each other.
    """
    if global_batch_size is None and (is_pure or changes):
        what = "batches='pure'" if is_pure else "a change of weights"
        raise ValueError(f"{what} needs global_batch_size, the number of samples in the batches of all ranks")
    if changes and stop == "all-once":
        raise ValueError("stop='all-once' decides when the weights change: use another stop, or do not change them")

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
    """Return weights that are proportional to the sources' sizes, times their repetitions, to a power."""
    sizes = {source.name: source.num_samples * source.repeat for source in sources}
    return sizes if temperature == 1 else {name: size**temperature for name, size in sizes.items()}


class MixedOrder:
    """The order of a mixture.

    A pick takes ``unit`` consecutive samples of one source: one, or a whole batch.

    Args:
        sources: The sources.
        weights: The weight of each source, as integers.
        changes: The picks from which the weights change, in ascending order, with the new weights.
        stop: The end of an epoch, or the number of samples in an epoch.
        unit: The number of samples in a pick.
        seed: The seed of the schedule; None for a regular one.

    Attributes:
        num_samples: N, the number of samples in an epoch.
        num_all_samples: The number of samples of all sources.
        starts: int64 [sources], the index of each source's first sample if the sources' samples are counted together.

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
            self.phases.append(Phase(start, Schedule(changed, seed), self.count(start * unit, of_picks=True)))
        self.num_samples = self._find_stop(stop)
        if not self.num_samples:
            raise ValueError("an epoch of the mixture has no samples: a source is too small for its weight")
        self._orders = dict[tuple[int, int], EpochOrder]()

    def count(self, position: int, *, of_picks: bool = False) -> tuple[int, ...]:
        """Return the number of samples of each source before a position, counted from the beginning of epoch 0.

        Args:
            position: The position. If a pick has several samples, the result includes the pick that the position is in.
            of_picks: Whether to return the number of picks instead.
        """
        pick = -(-position // self.unit)
        counts = self._find_phase(pick).count(pick)
        return counts if of_picks else tuple(count * self.unit for count in counts)

    def weights_at(self, position: int) -> tuple[int, ...]:
        """Return the weights of the sources at a position, counted from the beginning of epoch 0."""
        return self._find_phase(position // self.unit).schedule.weights

    def find(self, source: int, item: int) -> int | None:
        """Return the position of the first sample of a pick from a source, counted from the beginning of epoch 0.

        Args:
            source: The source.
            item: The number of earlier picks from the source.

        Returns:
            The position; None if the source is not picked so often.
        """
        stops = [phase.before[source] for phase in self.phases[1:]]
        phase = self.phases[bisect_right(stops, item)]
        if not phase.schedule.weights[source]:
            return None
        return (phase.start + phase.schedule.find(source, item - phase.before[source])) * self.unit

    def pick(self, epoch: int, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source of each position of an epoch, and the number of the source's earlier samples, int64 [n].

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
        """Return the samples at positions of an epoch, int64 [n].

        The result counts the samples of all sources, one after another, and the epoch of the source: source epoch *
        ``num_all_samples`` + the source's first index + the sample's index. So repetitions differ, and random
        transforms differ with them.
        """
        sources, items = self.pick(epoch, positions)
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

    def arrange(self, epoch: int, positions: Ints) -> Ints:
        """Return positions so that each run of them has the same mixture and reads neighboring samples of each source.

        Args:
            epoch: The epoch of the mixture.
            positions: int64 [n], consecutive positions.
        """
        sources, items = self.pick(epoch, positions)
        regions = np.zeros_like(items)
        for source in np.unique(sources).tolist():
            settings, rows = self.sources[source].settings, sources == source
            if settings.shuffle:
                window, index = np.divmod(items[rows] % self._sizes[source], settings.window)
                regions[rows] = window * settings.strata + reverse_bits(settings.strata)[index % settings.strata]
        order = np.lexsort((positions, regions, sources))
        counts = np.bincount(sources, minlength=len(self.sources))
        places = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        shares: NDArray[np.float64] = (places + 0.5) / np.repeat(counts, counts)
        return positions[order[np.argsort(shares, kind="stable")]]

    def dump(self, cursor: Cursor) -> dict[str, Any]:
        """Return the state of a run that has reached ``cursor``: what determined the samples up to it."""
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
        """Check that a state belongs to this mixture up to its position, and return its cursor.

        Weights may change after the state's position, and sources may be added or removed there.

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
            raise ValueError(f"epoch {epoch} of a mixture of {self.num_samples} samples is out of range")
        return start

    def _find_phase(self, pick: int) -> Phase:
        return self.phases[bisect_right(self.phases, pick, key=lambda phase: phase.start) - 1]

    def _find_order(self, source: int, epoch: int) -> EpochOrder:
        if (order := self._orders.get((source, epoch))) is None:
            if len(self._orders) > 4 * len(self.sources):  # Consecutive epochs are in use.
                self._orders.clear()
            order = EpochOrder(self.sources[source].shard_sizes, self.sources[source].settings, epoch)
            self._orders[source, epoch] = order
        return order

    def _deliver_once(self) -> None:
        # A source leaves the mixture after its last sample, and the others keep their proportions.
        if self.unit > 1:
            raise ValueError("stop='all-once' needs batches='mixed', because sources do not fill whole batches")
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
        # Picks of the phase: as many as repeat nothing of the source (first), or as deliver all of it (longest).
        goal, weight = self._goals[source], phase.schedule.weights[source]
        left = (goal // self.unit if stop == "first" else -(-goal // self.unit)) - phase.before[source]
        if left <= 0 and stop == "longest":
            return 0
        if not weight:
            return None
        total = sum(phase.schedule.weights)
        return max(left, 0) * total // weight if stop == "first" else -(-left * total // weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSplit(Split):
    """One rank's share of an epoch of a mixture: every rank's batches have the mixture of the whole step.

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
            return start + places
        arranged = self.order.arrange(self.epoch, np.arange(start, min(stop, self.num_samples)))
        is_repeat = places >= len(arranged)
        return np.concatenate([np.sort(arranged[places[~is_repeat]]), start + places[is_repeat]])

    def batches(self, steps: Sequence[int]) -> list[Ints]:
        # Without arguments, super() does not work in a dataclass with slots.
        return Split.batches(self, steps) if self.world_size == 1 else [self.batch(step) for step in steps]
