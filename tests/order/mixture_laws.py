"""The laws of a mixture's order. Tests check the laws on some cases, and ``tools/order_campaign.py`` on many."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from shardio.errors import StateError
from shardio.order import (
    Cursor,
    EpochOrder,
    MixedOrder,
    MixedSplit,
    OrderSettings,
    SourceOrder,
    Stop,
    count_weights,
    decode_picks,
    reverse_bits,
)
from tests.raising import assert_raises

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MixtureCase:
    """A mixture, the weights that change at some picks, and the ranks that read the mixture."""

    sources: tuple[SourceOrder, ...]
    weights: tuple[int, ...]
    changes: tuple[tuple[int, tuple[int, ...]], ...]
    stop: Stop | int
    unit: int
    seed: int | None
    world_size: int
    batch_size: int
    epoch: int
    probe: int


def draw_mixture(seed: int) -> MixtureCase:
    """Return the case for a seed."""
    rng = random.Random(seed)
    num_sources = rng.choice((1, 2, 2, 3, 5, 9))
    sources = tuple(_draw_source(rng, name) for name in range(num_sources))
    stop: Stop | int = rng.choice(("first", "longest", "all-once", rng.randint(1, 3000)))
    unit = 1 if stop == "all-once" else rng.choice((1, 1, 3, 8))
    if isinstance(stop, int):
        stop *= unit
    changes = []
    if stop != "all-once" and rng.random() < 0.4:
        starts = sorted(rng.sample(range(1, 2000), rng.randint(1, 3)))
        changes = [(start, _draw_weights(rng, num_sources, zeros=isinstance(stop, int))) for start in starts]
    return MixtureCase(
        sources=sources,
        weights=_draw_weights(rng, num_sources, zeros=isinstance(stop, int)),
        changes=tuple(changes),
        stop=stop,
        unit=unit,
        seed=rng.choice((None, 0, rng.randrange(2**63))),
        world_size=rng.choice((1, 2, 3, 8)),
        batch_size=rng.randint(1, 12),
        epoch=rng.choice((0, 1, 2, rng.randrange(10**6))),
        probe=rng.randrange(10**12),
    )


def _draw_source(rng: random.Random, name: int) -> SourceOrder:
    # Tiny strata are slow to shuffle, so most sources have a few hundred samples.
    sizes = np.array([rng.randint(1, rng.choice((9, 150, 150))) for _ in range(rng.randint(1, 5))])
    shuffle, strata = rng.random() < 0.7, rng.choice((1, 1, 2, 8) if sizes.sum() > 150 else (1,))
    window = -(-rng.randint(int(sizes.sum()) // 2 + 1, int(sizes.sum())) // strata) * strata
    settings = OrderSettings(
        shuffle=shuffle, seed=rng.randrange(3), window=window if shuffle else 1, strata=strata if shuffle else 1
    )
    return SourceOrder(
        name=f"source {name}", shard_sizes=sizes, settings=settings, digest=str(name), repeat=rng.choice((1, 1, 3))
    )


def _draw_weights(rng: random.Random, num_sources: int, *, zeros: bool) -> tuple[int, ...]:
    kind = rng.randrange(4)
    weights: list[float] = [
        (rng.random() + 1e-3, 10 ** (-2.5 * rng.random()), rng.randint(1, 9), 1.0)[kind] for _ in range(num_sources)
    ]
    if zeros and num_sources > 1 and rng.random() < 0.3:
        weights[rng.randrange(num_sources)] = 0.0
    return count_weights(weights)


def check_mixture(case: MixtureCase) -> None:
    """Raise AssertionError if a law does not hold.

    A mixture whose sources are too small for their weights must be refused.
    """
    goals = [source.num_samples * source.repeat // case.unit for source in case.sources]
    if case.stop == "first" and any(
        weight > goal * sum(case.weights) for weight, goal in zip(case.weights, goals, strict=True)
    ):
        assert_raises(ValueError, "no samples", _make_order, case)
        return
    order = _make_order(case)
    _check_proportions(case, order)
    _check_sources(case, order)
    _check_stop(case, order)
    _check_split(case, order)
    _check_state(case, order)


def _make_order(case: MixtureCase, changes: tuple[tuple[int, tuple[int, ...]], ...] | None = None) -> MixedOrder:
    return MixedOrder(
        case.sources,
        case.weights,
        case.changes if changes is None else changes,
        stop=case.stop,
        unit=case.unit,
        seed=case.seed,
    )


def _check_proportions(case: MixtureCase, order: MixedOrder) -> None:
    """Check that a prefix of a phase picks a source floor(n * w) or ceil(n * w) times, even far into the schedule."""
    for phase in (*order.phases[:2], *order.phases[-1:]):
        weights, total = phase.schedule.weights, sum(phase.schedule.weights)
        start = case.probe % 10**9 if phase is order.phases[-1] else 0
        positions = np.arange(start, start + 2500)
        sources, items = phase.schedule.locate(positions)
        before = phase.schedule.count(start)
        for source, weight in enumerate(weights):
            drawn = before[source] + np.cumsum(sources == source)
            exact = (positions + 1) * weight  # Below 2**61.
            assert (exact // total <= drawn).all()
            assert (drawn <= -(-exact // total)).all()
            own = items[sources == source]
            assert own.tolist() == list(range(before[source], before[source] + len(own)))
        middle = int(positions[len(positions) // 3])
        counted = np.bincount(sources[: middle - start], minlength=len(weights)) + before
        assert phase.schedule.count(middle) == counted.tolist()


def _check_sources(case: MixtureCase, order: MixedOrder) -> None:
    """Check that each source is read in its own order, and that a pick takes ``unit`` samples from one source."""
    num_samples = min(order.num_samples, 120)
    positions = np.arange(num_samples)
    sources, items = order.pick(case.epoch, positions)
    indices = order.samples_at(case.epoch, positions)
    found, inner = order.split_index(indices)
    assert (found == sources).all()
    first = order.count(0 if case.stop == "all-once" else case.epoch * order.num_samples)
    for number, source in enumerate(case.sources):
        own = items[sources == number]
        goal = source.num_samples * source.repeat
        start = case.epoch * goal if case.stop == "all-once" else first[number]
        assert own.tolist() == list(range(start, start + len(own)))
        for epoch in np.unique(own // source.num_samples).tolist():
            rows = own // source.num_samples == epoch
            alone = EpochOrder(source.shard_sizes, source.settings, epoch).samples_at(own[rows] % source.num_samples)
            assert inner[sources == number][rows].tolist() == alone.tolist()
    assert all(len(set(draw)) == 1 for draw in np.split(sources, range(case.unit, num_samples, case.unit)))
    assert len(np.unique(indices)) == num_samples  # A repeated sample has a different source epoch.
    assert order.samples_at(case.epoch, positions[::7] + order.num_samples).tolist() == indices[::7].tolist()


def _check_stop(case: MixtureCase, order: MixedOrder) -> None:
    """Check that an epoch ends where ``stop`` says."""
    goals = np.array([source.num_samples * source.repeat for source in case.sources])
    counts = np.array(order.count(order.num_samples))
    if case.stop == "first":
        assert (counts <= goals).all()
        longer = np.array(order.count(order.num_samples + 2 * case.unit * len(goals) + case.unit * int(goals.max())))
        assert (longer > goals).any()
    elif case.stop == "longest":
        assert (counts >= goals).all()
    elif case.stop == "all-once":
        assert counts.tolist() == goals.tolist()
    else:
        assert order.num_samples == case.stop


def _check_split(case: MixtureCase, order: MixedOrder) -> None:
    """Check that ranks divide a step's samples: each rank has its share of each source, in neighboring strata."""
    num_ranks, size = case.world_size, case.batch_size
    for start in {0, case.probe % order.num_samples}:
        shares = [
            MixedSplit(
                num_samples=order.num_samples,
                start=start,
                rank=rank,
                world_size=num_ranks,
                batch_size=size,
                strata=1,
                remainder="keep",
                order=order,
                epoch=case.epoch,
            )
            for rank in range(num_ranks)
        ]
        num_steps = shares[0].num_batches
        for step in {0, 1, num_steps - 2, num_steps - 1} & set(range(num_steps)):
            first = start + step * num_ranks * size
            positions = np.arange(first, min(first + num_ranks * size, order.num_samples))
            picks = list(zip(*(each.tolist() for each in order.pick(case.epoch, positions)), strict=True))
            batches = [share.batch(step) for share in shares if step < share.num_batches]
            together = [share.batches([step])[0] for share in shares if step < share.num_batches]
            assert all(map(np.array_equal, batches, together))
            found = [list(zip(*(each.tolist() for each in decode_picks(batch)), strict=True)) for batch in batches]
            expected = picks if num_ranks == 1 else _merge(case, picks)
            assert [pick for batch in found for pick in batch] == expected
            assert [len(batch) for batch in batches] == [
                len(positions) // num_ranks + (rank < len(positions) % num_ranks) for rank in range(len(batches))
            ]


def _merge(case: MixtureCase, picks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Compute the picks of a step from the definition, in the order in which ranks take them."""
    by_source = defaultdict[int, list[int]](list)
    for source, item in picks:
        by_source[source].append(item)
    keyed = []
    for source, items in by_source.items():
        size, settings = case.sources[source].num_samples, case.sources[source].settings
        stratum_of = reverse_bits(settings.strata).tolist()
        items.sort(key=lambda item: (item // size, stratum_of[item % size % settings.strata], item))
        keyed += [(Fraction(2 * row + 1, 2 * len(items)), source, item) for row, item in enumerate(items)]
    return [(source, item) for _, source, item in sorted(keyed, key=lambda each: each[:2])]


def _check_state(case: MixtureCase, order: MixedOrder) -> None:
    """Check that a state is small, survives a JSON round trip, and can be loaded only by its own schedule."""
    cursor = Cursor(epoch=case.epoch, position=case.probe % (order.num_samples + 1))
    state = json.loads(json.dumps(order.dump(cursor)))
    assert len(json.dumps(state)) < 2000
    assert _make_order(case).read(state) == cursor
    if case.stop in ("longest", "first", "all-once") or case.epoch or len(case.sources) < 2:
        return
    draw = -(-cursor.position // case.unit)
    begun = tuple(change for change in case.changes if change[0] * case.unit < cursor.position)
    later = (max(draw, 1 if not begun else begun[-1][0] + 1), tuple(reversed(case.weights)))
    assert _make_order(case, (*begun, later)).read(state) == cursor
    if draw > 1 and not begun and later[1] != case.weights:
        assert_raises(StateError, None, lambda: _make_order(case, ((draw - 1, later[1]),)).read(state))
