"""The laws of order and state hold, orders are those of the last release, and epochs follow each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from shardio.errors import StateError
from shardio.order import (
    POLICIES,
    Cursor,
    EpochCounter,
    EpochOrder,
    OrderSettings,
    Progress,
    Remainder,
    Split,
    choose_settings,
    dump_state,
    read_state,
)
from shardio.order.state import STATE_VERSION
from shardio.testing.remainder_policy import RemainderPolicyTests
from tests.order.laws import Case, Group, LawBrokenError, check_laws, check_windows
from tests.raising import assert_raises
from tools.freeze_orders import SHARDS

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
    remainder=st.sampled_from(list(POLICIES)),
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


class TestRemainderPolicies(RemainderPolicyTests):
    @pytest.fixture(params=POLICIES)
    def remainder(self, request: pytest.FixtureRequest) -> Any:
        return request.param


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(CASES)
def test_the_laws_of_order_and_state_hold(case: Case) -> None:
    check_laws(case)


@pytest.mark.parametrize("remainder", POLICIES)
@pytest.mark.parametrize("name", ["num_batches", "num_own_samples", "batch", "position_after"])
def test_a_split_off_by_one_breaks_a_law(name: str, remainder: Remainder, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(Split, name)
    if isinstance(original, property):
        monkeypatch.setattr(Split, name, property(lambda split: original.__get__(split) + 1))
    else:
        monkeypatch.setattr(Split, name, lambda split, step: original(split, step) + 1)
    assert_raises(AssertionError, None, check_laws, replace(EXAMPLE, remainder=remainder))


def test_an_order_that_repeats_a_sample_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    original = EpochOrder.samples_at
    monkeypatch.setattr(EpochOrder, "samples_at", lambda order, positions: original(order, positions) // 2 * 2)
    assert_raises(LawBrokenError, "permutation", check_laws, EXAMPLE)


def test_an_order_of_other_windows_breaks_a_law() -> None:
    order = EpochOrder(np.array(EXAMPLE.shard_sizes), replace(EXAMPLE.settings, window=23, lanes=1), EXAMPLE.epoch)
    samples = order.samples_at(np.arange(23)).tolist()
    check_windows(replace(EXAMPLE, settings=order.settings), samples)
    with pytest.raises(LawBrokenError, match="window"):
        check_windows(replace(EXAMPLE, settings=replace(order.settings, window=5)), samples)


def test_numbers_beyond_32_bits_are_exact() -> None:
    sizes = np.full(1000, 10**8)  # 10^11 samples.
    chosen = replace(choose_settings(sizes, shuffle=True, seed=0), lanes=16, window=4 * 10**8)
    order = EpochOrder(sizes, chosen, 0)
    positions = np.arange(10**11 - 4096, 10**11)
    samples = order.samples_at(positions)
    assert len(np.unique(samples)) == 4096
    assert samples.min() >= 0
    assert samples.max() < 10**11


GOLDEN = json.loads((Path(__file__).parent / "golden_orders.json").read_text())


def test_orders_are_the_frozen_ones() -> None:
    assert (GOLDEN["version"], len(GOLDEN["cases"])) == (STATE_VERSION, 4 * 3 * 3)
    for case in GOLDEN["cases"]:
        chosen = OrderSettings(shuffle=True, seed=case["seed"], lanes=case["lanes"], window=case["window"])
        order = EpochOrder(np.array(SHARDS[case["dataset"]]), chosen, case["epoch"])
        assert order.samples_at(np.array(case["positions"])).tolist() == case["samples"], case


def settings_of(*sizes: int, **options: Any) -> OrderSettings:
    return choose_settings(np.array(sizes), **{"shuffle": True, "seed": 0, **options})


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_defaults_are_in_range(sizes: list[int]) -> None:
    chosen = settings_of(*sizes)
    assert 1 <= chosen.window <= sum(sizes)
    assert 1 <= chosen.lanes <= 8


def test_defaults_follow_the_size() -> None:
    assert settings_of(100, 100, 85) == OrderSettings(shuffle=True, seed=0, lanes=1, window=285)
    assert settings_of(*[5000] * 2000) == OrderSettings(shuffle=True, seed=0, lanes=8, window=20_000)
    assert settings_of(10, shuffle=False) == OrderSettings(shuffle=False, seed=0, lanes=1, window=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lanes": 0}, "lanes must be at least 1"),
        ({"window": 0}, "window must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**63}, "below 2\\*\\*63"),
        ({"shuffle": False, "lanes": 2}, "no effect without shuffle"),
        ({"shuffle": False, "window": 2}, "no effect without shuffle"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    assert_raises(ValueError, words, settings_of, 10, **options)


N = 100
SETTINGS = OrderSettings(shuffle=True, seed=3, lanes=2, window=50)


def started(loaded: Cursor | None, *epochs: int) -> list[Cursor]:
    """Return the next two epochs of a counter that loads a cursor and is told epochs; asking changes nothing."""
    counter, found = EpochCounter(), list[Cursor]()
    if loaded is not None:
        counter.load(loaded)
    for epoch in epochs:
        counter.set_epoch(epoch)
    for _ in range(2):
        asked = [counter.find_start(N), counter.find_start(N)]
        found.append(counter.start(N))
        assert asked == [found[-1]] * 2
    return found


@pytest.mark.parametrize(
    ("loaded", "epochs", "expected"),
    [
        (None, [], [Cursor(epoch=0), Cursor(epoch=1)]),
        (None, [7], [Cursor(epoch=7), Cursor(epoch=8)]),
        (Cursor(epoch=5, position=40), [], [Cursor(epoch=5, position=40), Cursor(epoch=6)]),
        (Cursor(epoch=5, position=40), [5], [Cursor(epoch=5, position=40), Cursor(epoch=6)]),
        (Cursor(epoch=5, position=40), [6, 5], [Cursor(epoch=5), Cursor(epoch=6)]),
    ],
)
def test_epochs_follow_a_loaded_one_and_the_one_that_is_set(
    loaded: Cursor | None, epochs: list[int], expected: list[Cursor]
) -> None:
    assert started(loaded, *epochs) == expected


def test_an_epoch_that_was_begun_can_be_repeated_from_its_beginning() -> None:
    counter = EpochCounter()
    counter.load(Cursor(epoch=5, position=40))
    counter.start(N)
    for _ in range(2):
        counter.set_epoch(5)
        assert counter.start(N) == Cursor(epoch=5)


def test_the_cursor_stays_in_an_epoch_in_flight_until_it_ends_or_the_next_one_starts() -> None:
    counter = EpochCounter()

    def start() -> Progress:
        cursor = counter.start(N)
        of_rank: dict[str, Any] = {"rank": 0, "world_size": 1, "batch_size": 25, "shuffled": True, "remainder": "pad"}
        split = Split(num_samples=N, start=cursor.position, **of_rank)
        counter.progress = Progress(cursor=cursor, split=split)
        return counter.progress

    start().num_batches = 2
    counter.set_epoch(7)
    assert counter.now == Cursor(epoch=0, position=50)
    progress = start()
    assert counter.now == Cursor(epoch=7)
    progress.num_batches = 4
    assert counter.now == Cursor(epoch=7, position=N)
    counter.set_epoch(9)
    assert counter.now == Cursor(epoch=9)


def state() -> dict[str, Any]:
    return dump_state(Cursor(epoch=2, position=64), SETTINGS, "d1", N)


def test_a_state_is_small_json_and_round_trips() -> None:
    text = json.dumps(state())
    assert len(text) < 400
    assert read_state(json.loads(text), SETTINGS, "d1", N) == Cursor(epoch=2, position=64)


PARTS = ("dataset", "order")
NO_PARTS: tuple[Any, ...] = ("text", 3, [1], None, {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": STATE_VERSION + 1}, f"version {STATE_VERSION + 1}, but"),
        ({"version": STATE_VERSION - 1}, f"version {STATE_VERSION - 1}, but"),
        ({"version": None}, "version None"),
        *(({part: value}, f"{part}.* in the state and .* here") for part in PARTS for value in NO_PARTS),
        ({"epoch": -1}, "epoch must be an integer, at least 0"),
        ({"epoch": "2"}, "epoch must be an integer"),
        ({"position": 101}, "position must be an integer from 0 to 100, got 101"),
        ({"position": -1}, "from 0 to 100, got -1"),
        ({"dataset": {"digest": "d2", "samples": N}}, "dataset.digest is 'd2' in the state and 'd1' here"),
        ({"dataset": {}}, "dataset.digest is None in the state"),
        ({"order": {"shuffle": True, "seed": 4, "lanes": 2, "window": 50}}, "order.seed is 4 in the state and 3 here"),
        ({"order": {"shuffle": True, "seed": 3, "lanes": 4, "window": 9}}, "order.lanes is 4.*; order.window is 9"),
    ],
)
def test_a_state_that_does_not_match_is_refused_with_the_differences(change: dict[str, Any], words: str) -> None:
    assert_raises(StateError, words, read_state, {**state(), **change}, SETTINGS, "d1", N)
