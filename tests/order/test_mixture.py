"""The order of mixtures: its laws on random cases, access to any position, and refused states."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers

from shardio.errors import StateError
from shardio.order import Cursor, MixedOrder, OrderSettings, SourceOrder, count_weights
from shardio.order.schedule import Schedule
from tests.order.mixture_laws import check_mixture, draw_mixture
from tests.raising import assert_raises


@given(integers(0, 2**40))
def test_the_laws_hold(seed: int) -> None:
    check_mixture(draw_mixture(seed))


def make_order(*sizes: int, weights: tuple[float, ...], **options: object) -> MixedOrder:
    sources = [
        SourceOrder(
            name=f"source-{number:02d}",
            shard_sizes=np.array([size]),
            settings=OrderSettings(shuffle=True, seed=0, window=size, strata=1),
            digest=f"{number:032x}",
        )
        for number, size in enumerate(sizes)
    ]
    settings: dict[str, object] = {"changes": [], "stop": "first", "unit": 1, "seed": 0, **options}
    return MixedOrder(sources, count_weights(weights), **settings)  # type: ignore[arg-type]  # chosen by the test


def test_fifty_sources_of_many_samples_are_reached_anywhere_and_have_a_small_state() -> None:
    rng = np.random.default_rng(0)
    weights = tuple(float(weight) for weight in 10 ** (-3 * rng.random(50)))
    order = make_order(*[2 * 10**7] * 50, weights=weights, stop=10**9)
    total = sum(order.phases[0].schedule.weights)
    for position in (0, 10**9 // 3, 10**9 - 1):
        order.samples_at(7, np.array([position]))
        counts = order.count(7 * 10**9 + position)
        exact = [(7 * 10**9 + position) * weight for weight in order.phases[0].schedule.weights]
        assert all(share // total <= count <= -(-share // total) for share, count in zip(exact, counts, strict=True))
    assert len(json.dumps(order.dump(Cursor(epoch=3, position=10**8)))) < 2000


def test_a_schedule_without_a_seed_is_regular_and_with_one_varies() -> None:
    regular = Schedule((1, 1)).locate(np.arange(1024))[0]
    assert set(np.diff(regular).tolist()) == {-1, 1}  # They alternate.
    varied = [Schedule((5, 3, 2), seed).locate(np.arange(1024))[0].tolist() for seed in (0, 0, 1)]
    assert varied[0] == varied[1] != varied[2]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ((0.7, 0.3), (7, 3)),
        ((2, 4, 0), (1, 2, 0)),
        ((0.1, 0.2), (1, 2)),
        ((1e10, 1e10), (1, 1)),
        ((3**0.5, 1), (17320508075688772, 10**16)),
    ],
)
def test_weights_keep_their_proportions(weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    found = count_weights(weights)
    assert sum(found) <= 2**31
    assert np.allclose(np.array(found) / sum(found), np.array(counts) / sum(counts), rtol=0, atol=1e-9)
    if sum(counts) < 2**31:
        assert found == counts


def test_a_state_refuses_another_mixture_and_accepts_a_new_source_from_here_on() -> None:
    order = make_order(100, 50, weights=(2, 1), stop=600)
    state = order.dump(Cursor(epoch=0, position=300))
    others = {
        "weights is": make_order(100, 50, weights=(1, 1), stop=600),
        "digest is": make_order(100, 51, weights=(2, 1), stop=600),
        "seed is": make_order(100, 50, weights=(2, 1), stop=600, seed=1),
        "unit is": make_order(100, 50, weights=(2, 1), stop=600, unit=2),
    }
    for message, other in others.items():
        assert_raises(StateError, message, other.read, state)
    assert_raises(StateError, "sources is None", order.read, {"version": state["version"], "epoch": 0, "position": 0})
    longer = make_order(100, 50, 20, weights=(2, 1, 0), stop=900, changes=[(300, (1, 1, 1))])
    assert longer.read(state) == Cursor(epoch=0, position=300)
    picks = [some.pick(0, np.arange(300))[0].tolist() for some in (longer, order)]
    assert (picks[0], max(picks[0])) == (picks[1], 1)
