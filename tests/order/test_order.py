"""Random words, the order made from them, its state and its quality, compared with plain Python or known values."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations, pairwise, permutations
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from numpy.typing import NDArray

from shardio.errors import StateError
from shardio.order import (
    POLICIES,
    Cursor,
    EpochCounter,
    EpochOrder,
    OrderQuality,
    OrderSettings,
    Progress,
    Remainder,
    RemainderPolicy,
    Split,
    Words,
    choose_settings,
    derive_rng_key,
    divide_among_ranks,
    dump_state,
    make_rng_key,
    measure_quality,
    permute,
    random_words,
    read_state,
    shards_of,
    to_unit,
)
from shardio.order.state import STATE_VERSION
from shardio.testing.samples import RemainderPolicyTests, make_world
from tests.order.laws import Case, Group, LawBrokenError, check_laws, check_windows
from tests.raising import assert_raises
from tools.freeze_orders import SHARDS

ORDERS = st.one_of(
    st.builds(OrderSettings, shuffle=st.just(False), seed=st.integers(0, 9), window=st.just(1), strata=st.just(1)),
    st.builds(
        lambda strata, rows, seed: OrderSettings(shuffle=True, seed=seed, window=rows * strata, strata=strata),
        strata=st.sampled_from([1, 2, 4, 8, 16]),
        rows=st.integers(1, 20),
        seed=st.integers(0, 2**63 - 1),
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
    settings=OrderSettings(shuffle=True, seed=3, window=8, strata=4),
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


@pytest.mark.parametrize("attribute", ["repeats", "leaves_out", "uses_batch_size"])
@pytest.mark.parametrize("remainder", POLICIES)
def test_the_suite_refuses_a_policy_with_a_wrong_attribute(
    remainder: Remainder, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: Any = {attribute: not getattr(POLICIES[remainder], attribute)}
    monkeypatch.setattr("shardio.order.split.POLICIES", {remainder: replace(POLICIES[remainder], **wrong)})
    worlds = [make_world(random.Random(number), remainder, strata=1) for number in range(300)]
    suite = TestRemainderPolicies()
    assert_raises(AssertionError, attribute, suite.test_the_attributes_describe_the_policy, worlds)


def fill(num_left: int, world_size: int, batch_size: int) -> int:
    return num_left + -num_left % (world_size * batch_size)


@pytest.mark.parametrize("uses_batch_size", [False, True])
def test_the_laws_follow_from_the_attributes_of_a_policy(
    uses_batch_size: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = RemainderPolicy(effect="fills batches", count_dealt=fill, repeats=True, uses_batch_size=uses_batch_size)
    monkeypatch.setattr("shardio.order.split.POLICIES", {"pad": policy})
    case = replace(EXAMPLE, remainder="pad", groups=(Group(world_size=3, num_workers=1, batch_size=5),))
    if uses_batch_size:
        check_laws(case)
    else:
        assert_raises(LawBrokenError, r"all ranks together have \{24\} samples", check_laws, case)


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


def test_an_order_that_repeats_a_sample_or_has_other_windows_breaks_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    order = EpochOrder(np.array(EXAMPLE.shard_sizes), replace(EXAMPLE.settings, window=23, strata=1), EXAMPLE.epoch)
    samples = order.samples_at(np.arange(23)).tolist()
    check_windows(replace(EXAMPLE, settings=order.settings), samples)
    other = replace(EXAMPLE, settings=replace(order.settings, window=5))
    assert_raises(LawBrokenError, "window", check_windows, other, samples)
    original = EpochOrder.samples_at
    monkeypatch.setattr(EpochOrder, "samples_at", lambda order, positions: original(order, positions) // 2 * 2)
    assert_raises(LawBrokenError, "permutation", check_laws, EXAMPLE)


def test_numbers_beyond_32_bits_are_exact() -> None:
    sizes = np.full(1000, 10**8)  # 10^11 samples.
    chosen = replace(choose_settings(sizes, shuffle=True, seed=0), window=4 * 10**8, strata=16)
    samples = EpochOrder(sizes, chosen, 0).samples_at(np.arange(10**11 - 4096, 10**11))
    assert len(np.unique(samples)) == 4096
    assert 0 <= samples.min() <= samples.max() < 10**11


GOLDEN = json.loads((Path(__file__).parent / "golden_orders.json").read_text())


def test_orders_are_the_frozen_ones() -> None:
    assert (GOLDEN["version"], len(GOLDEN["cases"])) == (STATE_VERSION, 4 * 3 * 3)
    for case in GOLDEN["cases"]:
        chosen = OrderSettings(shuffle=True, seed=case["seed"], window=case["window"], strata=case["strata"])
        order = EpochOrder(np.array(SHARDS[case["dataset"]]), chosen, case["epoch"])
        assert order.samples_at(np.array(case["positions"])).tolist() == case["samples"], case


def settings_of(*sizes: int, **options: Any) -> OrderSettings:
    return choose_settings(np.array(sizes), **{"shuffle": True, "seed": 0, **options})


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_defaults_are_in_range(sizes: list[int]) -> None:
    chosen = settings_of(*sizes)
    assert (1 <= chosen.strata <= 4096, chosen.window % chosen.strata) == (True, 0)
    assert chosen.window < sum(sizes) + chosen.strata


@pytest.mark.parametrize(
    ("sizes", "options", "window", "strata"),
    [
        ([100, 100, 85], {}, 288, 8),
        ([50], {}, 50, 1),
        ([1000] * 1281, {}, 64_512, 1024),
        ([5000] * 2000, {}, 159_744, 4096),
        ([100_000] * 10_000, {}, 3_198_976, 4096),
        ([1000] * 1281, {"window": 1000}, 1008, 16),
        ([1000] * 1281, {"window": 10**9, "strata": 1}, 1_281_000, 1),
        ([10], {"shuffle": False}, 1, 1),
        ([1000] * 1281, {"is_sorted": True}, 128_100, 1),
        ([1000] * 239, {"is_sorted": True}, 239_000, 1),
        ([10] * 5, {"is_sorted": True}, 50, 1),
    ],
)
def test_defaults_follow_the_size(sizes: list[int], options: dict[str, Any], window: int, strata: int) -> None:
    chosen = settings_of(*sizes, **options)
    assert (chosen.window, chosen.strata) == (window, strata)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strata": 0}, "strata must be at least 1"),
        ({"strata": 6}, "strata must be a power of two, and at most 65536, got 6"),
        ({"strata": 2**17}, "at most 65536, got 131072"),
        ({"window": 0}, "window must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**63}, "below 2\\*\\*63"),
        ({"shuffle": False, "strata": 2}, "no effect without shuffle"),
        ({"shuffle": False, "window": 2}, "no effect without shuffle"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    assert_raises(ValueError, words, settings_of, 10, **options)


N = 100
SETTINGS = OrderSettings(shuffle=True, seed=3, window=50, strata=2)


def started(loaded: Cursor | None, *epochs: int) -> list[Cursor]:
    """Load a cursor into a counter, set epochs, and return the starts of the next two epochs.

    Check that finding a start in advance does not change the counter.
    """
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
        of_rank: dict[str, Any] = {"rank": 0, "world_size": 1, "batch_size": 25, "strata": 1, "remainder": "pad"}
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
        ({"order": {"shuffle": True, "seed": 4, "window": 50, "strata": 2}}, "order.seed is 4 in the state and 3 here"),
        ({"order": {"shuffle": True, "seed": 3, "window": 9, "strata": 4}}, "order.window is 9.*; order.strata is 4"),
    ],
)
def test_a_state_that_does_not_match_is_refused_with_the_differences(change: dict[str, Any], words: str) -> None:
    assert_raises(StateError, words, read_state, {**state(), **change}, SETTINGS, "d1", N)


def shuffle(size: int, key: Words) -> NDArray[np.int64]:
    return permute(np.arange(size), np.array([size]), key)


def test_it_is_a_permutation_for_every_small_size() -> None:
    sizes = np.arange(1, 300)
    keys = random_words(make_rng_key(0), sizes.astype(np.uint64))
    index = np.concatenate([np.arange(size) for size in sizes])
    images = np.split(permute(index, np.repeat(sizes, sizes), np.repeat(keys, sizes)), np.cumsum(sizes)[:-1])
    for size, image in zip(sizes.tolist(), images, strict=True):
        assert np.array_equal(np.sort(image), np.arange(size))
        if size in (1, 2, 3, 10, 64, 65, 299):
            assert np.array_equal(image, shuffle(size, keys[size - 1 : size]))


@given(size=st.integers(300, 100_000), seed=st.integers(0, 2**63 - 1))
def test_it_is_a_permutation_at_random_sizes(size: int, seed: int) -> None:
    assert np.bincount(shuffle(size, make_rng_key(seed)), minlength=size).max() == 1


@given(size=st.integers(2**32, 10**11), seed=st.integers(0, 2**63 - 1))
def test_it_is_one_to_one_at_sizes_beyond_32_bits(size: int, seed: int) -> None:
    index = np.unique(np.linspace(0, size - 1, 5000).astype(np.int64))
    image = permute(index, np.array([size]), make_rng_key(seed))
    assert len(np.unique(image)) == len(index)
    assert 0 <= image.min() <= image.max() < size


def images_over_keys(size: int, num_keys: int) -> NDArray[np.int64]:
    keys = random_words(make_rng_key(7, size), np.arange(num_keys, dtype=np.uint64))
    return permute(np.tile(np.arange(size), num_keys), np.array([size]), np.repeat(keys, size)).reshape(num_keys, size)


def deviation(counts: NDArray[np.int64], freedom: int, scale: float = 1.0) -> float:
    """Return the number of standard deviations by which the chi-square of counts exceeds that of uniform counts."""
    average = counts.mean()
    return float((scale * ((counts - average) ** 2 / average).sum() - freedom) / sqrt(2 * freedom))


@pytest.mark.parametrize("size", [7, 8, 16, 33])
def test_elements_and_neighbors_land_evenly(size: int) -> None:
    images = images_over_keys(size, 20_000)
    counts = np.stack([np.bincount(images[:, i], minlength=size) for i in range(size)])
    # The rows and columns of the counts have fixed sums, so the scaled value has (n-1)^2 degrees of freedom.
    assert abs(deviation(counts, (size - 1) ** 2, (size - 1) / size)) < 4
    pairs = np.bincount(images[:, 0] * size + images[:, 1], minlength=size * size).reshape(size, size)
    assert abs(deviation(pairs[~np.eye(size, dtype=bool)], size * (size - 1) - 1)) < 4


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_permutations_of_few_elements_are_equally_likely(size: int) -> None:
    images = images_over_keys(size, 40_000)
    number = {permutation: i for i, permutation in enumerate(permutations(range(size)))}
    counts = np.bincount([number[tuple(row)] for row in images.tolist()], minlength=len(number))
    assert abs(deviation(counts, len(number) - 1)) < 4


def test_words_are_those_of_splitmix64() -> None:
    # SplitMix64's first outputs for seed 1234567, from the public test vectors of the reference implementation.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    key = np.array([1234567], dtype=np.uint64)
    assert random_words(key, np.arange(4, dtype=np.uint64)).tolist() == expected


def test_keys_differ_by_their_parts_and_from_the_words_of_the_same_key() -> None:
    parts = ((), (0,), (1,), (0, 1), (1, 0), ("shards",), ("windows",), (0, "shards"), ("shards", 0))
    assert len({int(make_rng_key(seed, *each)[0]) for seed in range(20) for each in parts}) == 20 * len(parts)
    key, numbers = make_rng_key(0), np.arange(1000, dtype=np.uint64)
    assert not set(derive_rng_key(key, numbers).tolist()) & set(random_words(key, numbers).tolist())
    with pytest.raises(UnicodeEncodeError):  # A purpose must be ASCII.
        make_rng_key(0, "größe")


def test_unit_numbers_are_even_and_below_one() -> None:
    unit = to_unit(random_words(make_rng_key(0), np.arange(200_000, dtype=np.uint64)))
    assert 0 <= unit.min() <= unit.max() < 1
    counts, _ = np.histogram(unit, bins=100, range=(0, 1))
    assert abs(deviation(counts, 99)) < 4
    assert to_unit(np.array([2**64 - 1], dtype=np.uint64))[0] < 1


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_global_shuffle_is_near_the_ideal_everywhere(is_ours: bool) -> None:
    sizes = np.full(50, 1000)
    ours = EpochOrder(sizes, choose_settings(sizes, shuffle=True, seed=0, window=50_000, strata=1), epoch=0)
    order = ours.samples_at(np.arange(50_000)) if is_ours else np.random.default_rng(0).permutation(50_000)
    quality = measure_quality([order[rank::4] for rank in range(4)], sizes, sizes * 1000, 256)
    assert (quality.displacement, quality.separation) == pytest.approx((1 / 3, 1 / 3), abs=0.01)
    assert quality.same_shard == pytest.approx(quality.ideal_same_shard, rel=0.05)
    assert (quality.max_open, quality.read_factor) == (50, 4)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    num_ranks=st.integers(1, 5),
    step_size=st.integers(1, 12),
    num_bytes=st.lists(st.integers(1, 100), min_size=6, max_size=6),
    data=st.data(),
)
def test_measures_are_those_of_plain_loops(
    sizes: list[int], num_ranks: int, step_size: int, num_bytes: list[int], data: st.DataObject
) -> None:
    num_samples = sum(sizes)
    shuffled: list[int] = data.draw(st.permutations(range(num_samples)))
    ranks = [shuffled[rank::num_ranks] for rank in range(num_ranks)]
    order = [rank[turn] for turn in range(num_samples) for rank in ranks if turn < len(rank)]
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    shards = [owners[sample] for sample in order]
    assert shards_of(np.arange(num_samples), np.array(sizes)).tolist() == owners
    found = measure_quality(
        [np.array(rank, np.int64) for rank in ranks], np.array(sizes), np.array(num_bytes[: len(sizes)]), step_size
    )

    apart = [abs(order.index(a) - order.index(b)) for a, b in pairwise(range(num_samples)) if owners[a] == owners[b]]
    batches = [shards[start : start + step_size] for start in range(0, num_samples, step_size)]
    chances = [mean([a == b for a, b in combinations(batch, 2)]) for batch in batches if len(batch) > 1]
    of_ranks = [[owners[sample] for sample in rank] for rank in ranks]
    num_open = [len({*rank[: step + 1]} & {*rank[step:]}) for rank in of_ranks for step in range(len(rank))]
    share = sum(num_bytes[shard] / sizes[shard] for rank in of_ranks for shard in rank)
    expected = OrderQuality(
        displacement=mean([abs(position - sample) for position, sample in enumerate(order)]) / num_samples,
        separation=mean(apart) / num_samples,
        same_shard=mean(chances),
        ideal_same_shard=mean([a == b for a, b in combinations(owners, 2)]),
        mean_open=mean(num_open),
        max_open=max(num_open),
        read_factor=sum(num_bytes[shard] for rank in of_ranks for shard in {*rank}) / share,
    )
    assert asdict(found) == pytest.approx(asdict(expected), nan_ok=True)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_strata_keep_a_rank_in_a_part_of_each_window(world_size: int) -> None:
    sizes = np.full(64, 100)
    for strata, least, most in ((64, 1, 16 / world_size + 3), (1, 16, 17)):
        chosen = choose_settings(sizes, shuffle=True, seed=0, window=1600, strata=strata)
        for samples in divide_among_ranks(EpochOrder(sizes, chosen, epoch=0), world_size, 32):
            of_window = samples[: 1600 // (32 * world_size) * 32]
            assert least <= len(np.unique(shards_of(of_window, sizes))) <= most
