from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from shardio.train import seed_everything
from shardio.train.checkpoint import algorithms, load_random_states, random_states
from tests.processes import assert_passes_in_fresh_process


def _draw() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), float(np.random.rand()), random.random()


def test_a_seed_resets_all_generators() -> None:
    seed_everything(1, 2)
    first = _draw()
    assert _draw() != first
    seed_everything(1, 2)
    assert _draw() == first


def test_different_words_give_different_numbers() -> None:
    """Even if their sums, or their digits, are the same."""
    drawn = set()
    for words in [(1,), (2,), (1, 0), (1, 2), (2, 1), (12,), (0, 3), (3, 0)]:
        seed_everything(*words)
        drawn.add(str(_draw()))
    assert len(drawn) >= 7  # SeedSequence treats (1,) and (1, 0) as equal.


def test_restored_states_repeat_the_same_numbers() -> None:
    device = torch.device("cpu")
    seed_everything(5)
    _draw()
    states = random_states(device)
    expected = [_draw() for _ in range(3)]
    load_random_states(states, device)
    assert [_draw() for _ in range(3)] == expected


def test_deterministic_algorithms_are_used_only_within_the_block() -> None:
    def settings() -> tuple[bool, bool, str]:
        precision = torch.get_float32_matmul_precision()
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark, precision

    before = settings()
    with algorithms(deterministic=True):
        assert settings() == (True, False, before[2])
    assert settings() == before
    with algorithms(deterministic=False, tf32=True):
        assert settings() == (False, True, "high")
    assert settings() == before


def test_precisions_that_the_user_set_by_torchs_newer_names_are_kept() -> None:
    """torch refuses to mix them with its older names, for the rest of the process."""
    assert_passes_in_fresh_process(_keep_precisions_set_by_newer_names)


def _keep_precisions_set_by_newer_names() -> None:
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]  # it is there
    matmul.fp32_precision, conv.fp32_precision = "ieee", "tf32"
    for tf32, inside in ((False, "ieee"), (True, "tf32")):
        with algorithms(deterministic=False, tf32=tf32):
            assert matmul.fp32_precision == inside
        assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "tf32")


def test_settings_are_restored_after_an_error() -> None:
    def fail() -> None:
        raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"), algorithms(deterministic=True):
        fail()
    assert not torch.are_deterministic_algorithms_enabled()
