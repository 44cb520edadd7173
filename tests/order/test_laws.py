"""All laws of order and state together, for cases that Hypothesis draws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardio.order import EpochOrder, OrderSettings, Remainder, Split
from tests.order.laws import Case, Group, LawBrokenError, check_laws, check_windows

POLICIES: list[Remainder] = ["pad", "mask", "keep", "drop"]

ORDERS = st.one_of(
    st.builds(OrderSettings, shuffle=st.just(False), seed=st.integers(0, 9), lanes=st.just(1), window=st.just(1)),
    st.builds(
        OrderSettings,
        shuffle=st.just(True),
        seed=st.integers(0, 2**63 - 1),
        lanes=st.integers(1, 9),
        window=st.integers(1, 80),
    ),
)
WORLDS = {"world_size": st.integers(1, 6), "num_workers": st.integers(1, 4), "batch_size": st.integers(1, 8)}
STOPPING = st.builds(Group, num_batches=st.integers(0, 12), **WORLDS)

CASES = st.builds(
    lambda stopping, last, **rest: Case(groups=(*stopping, last), **rest),
    shard_sizes=st.lists(st.integers(0, 30), min_size=1, max_size=7).filter(any).map(tuple),
    settings=ORDERS,
    epoch=st.integers(0, 2**40),
    remainder=st.sampled_from(POLICIES),
    stopping=st.lists(STOPPING, max_size=2),
    last=st.builds(Group, **WORLDS),
    other_world_size=st.integers(1, 12),
    probe=st.integers(0, 10**6),
)

EXAMPLE = Case(
    shard_sizes=(5, 0, 13, 1, 4),
    settings=OrderSettings(shuffle=True, seed=3, lanes=3, window=4),
    epoch=2,
    remainder="keep",
    groups=(
        Group(world_size=2, num_workers=2, batch_size=3, num_batches=2),
        Group(world_size=3, num_workers=1, batch_size=1, num_batches=1),
        Group(world_size=4, num_workers=3, batch_size=2),
    ),
    other_world_size=3,
    probe=17,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CASES)
def test_the_laws_of_order_and_state_hold(case: Case) -> None:
    check_laws(case)


@pytest.mark.parametrize("remainder", POLICIES)
@pytest.mark.parametrize("name", ["num_batches", "num_own_samples", "batch", "position_after"])
def test_a_split_that_is_off_by_one_breaks_a_law(
    name: str, remainder: Remainder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The laws are not vacuous: the checks detect each of these errors."""
    original = getattr(Split, name)
    if isinstance(original, property):
        monkeypatch.setattr(Split, name, property(lambda split: original.__get__(split) + 1))
    else:
        monkeypatch.setattr(Split, name, lambda split, step: original(split, step) + 1)
    with pytest.raises(LawBrokenError):
        check_laws(replace(EXAMPLE, remainder=remainder))


def test_an_order_that_repeats_a_sample_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EpochOrder.samples_at
    monkeypatch.setattr(EpochOrder, "samples_at", lambda order, positions: original(order, positions) // 2 * 2)
    with pytest.raises(LawBrokenError, match="permutation"):
        check_laws(EXAMPLE)


def test_an_order_of_other_windows_breaks_a_law() -> None:
    order = EpochOrder(np.array(EXAMPLE.shard_sizes), replace(EXAMPLE.settings, window=23, lanes=1), EXAMPLE.epoch)
    samples = order.samples_at(np.arange(23)).tolist()
    check_windows(replace(EXAMPLE, settings=order.settings), samples)
    with pytest.raises(LawBrokenError, match="window"):
        check_windows(replace(EXAMPLE, settings=replace(order.settings, window=5)), samples)
