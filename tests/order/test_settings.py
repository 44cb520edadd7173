"""Defaults of lanes and windows come from the shards alone; settings out of range are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from shardio.order import OrderSettings, choose_settings


def settings_of(*sizes: int, **options: Any) -> OrderSettings:
    return choose_settings(np.array(sizes), **{"shuffle": True, "seed": 0, **options})


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30))
def test_defaults_are_in_range(sizes: list[int]) -> None:
    settings = settings_of(*sizes)
    assert 1 <= settings.window <= sum(sizes)
    assert 1 <= settings.lanes <= 8


def test_a_small_dataset_is_shuffled_as_a_whole() -> None:
    assert settings_of(100, 100, 85) == OrderSettings(shuffle=True, seed=0, lanes=1, window=285)


def test_a_large_dataset_has_several_lanes_of_several_windows() -> None:
    settings = settings_of(*[5000] * 2000)
    assert (settings.lanes, settings.window) == (8, 20_000)


def test_without_shuffling_there_is_one_lane_and_no_window() -> None:
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
    with pytest.raises(ValueError, match=words):
        settings_of(10, **options)
