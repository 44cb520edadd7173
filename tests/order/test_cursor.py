"""Which epoch is next: by default, after set_epoch, and after a state was loaded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shardio.errors import StateError
from shardio.order import Cursor, EpochCounter, OrderSettings, Progress, Split, dump_state, read_state
from shardio.order.state import STATE_VERSION

N = 100
SETTINGS = OrderSettings(shuffle=True, seed=3, lanes=2, window=50)


def test_every_start_is_the_next_epoch() -> None:
    counter = EpochCounter()
    assert [counter.start(N) for _ in range(3)] == [Cursor(epoch=0), Cursor(epoch=1), Cursor(epoch=2)]


def test_set_epoch_sets_the_next_epoch_and_counting_continues_from_it() -> None:
    counter = EpochCounter()
    counter.set_epoch(7)
    assert [counter.start(N).epoch for _ in range(2)] == [7, 8]


def test_an_epoch_can_be_repeated() -> None:
    counter = EpochCounter()
    for _ in range(2):
        counter.set_epoch(4)
        assert counter.start(N) == Cursor(epoch=4)


def test_a_loaded_cursor_is_resumed_once() -> None:
    counter = EpochCounter()
    counter.load(Cursor(epoch=5, position=40))
    assert counter.find_start(N) == counter.start(N) == Cursor(epoch=5, position=40)
    assert counter.find_start(N) == counter.find_start(N) == counter.start(N) == Cursor(epoch=6)


def test_set_epoch_of_the_loaded_epoch_keeps_its_position() -> None:
    counter = EpochCounter()
    counter.load(Cursor(epoch=5, position=40))
    counter.set_epoch(5)
    assert counter.start(N) == Cursor(epoch=5, position=40)
    counter.set_epoch(5)
    assert counter.start(N) == Cursor(epoch=5)


def test_set_epoch_of_another_epoch_drops_the_position() -> None:
    counter = EpochCounter()
    counter.load(Cursor(epoch=5, position=40))
    counter.set_epoch(6)
    counter.set_epoch(5)
    assert counter.start(N) == Cursor(epoch=5)


def test_a_negative_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        EpochCounter().set_epoch(-1)


@pytest.mark.parametrize("epoch", [1.5, "a", None])
def test_an_epoch_that_is_not_an_integer_is_refused(epoch: Any) -> None:
    with pytest.raises(TypeError, match=f"epoch must be an integer, got {epoch!r}"):
        EpochCounter().set_epoch(epoch)


def test_numpys_integers_are_epochs() -> None:
    counter = EpochCounter()
    counter.set_epoch(np.int32(7))  # type: ignore[arg-type]  # mypy does not know that it is an integer
    assert counter.start(N) == Cursor(epoch=7)
    assert type(counter.now.epoch) is int, "a state can be written as JSON"


def test_the_cursor_stays_in_an_epoch_in_flight_until_it_ends_or_the_next_one_starts() -> None:
    counter = EpochCounter()

    def start() -> Progress:
        cursor = counter.start(N)
        split = Split(
            num_samples=N,
            start=cursor.position,
            rank=0,
            world_size=1,
            batch_size=25,
            shuffled=True,
            remainder="pad",
        )
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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": STATE_VERSION + 1}, f"version {STATE_VERSION + 1}, but"),
        ({"version": STATE_VERSION - 1}, f"version {STATE_VERSION - 1}, but"),
        ({"version": None}, "version None"),
        ({"dataset": None}, "dataset.digest is None in the state"),
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
    with pytest.raises(StateError, match=words):
        read_state({**state(), **change}, SETTINGS, "d1", N)
