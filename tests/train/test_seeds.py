from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from shardio.train import seed_everything
from shardio.train.seeds import algorithms, load_random_states, random_states


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
    program = """if True:
        import torch
        from shardio.train.seeds import algorithms
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        for tf32 in (False, True):
            with algorithms(deterministic=False, tf32=tf32):
                print(torch.backends.cuda.matmul.fp32_precision)
            print(torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["ieee", "ieee", "tf32", "tf32", "ieee", "tf32"], done.stderr


def test_settings_are_restored_after_an_error() -> None:
    def fail() -> None:
        raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"), algorithms(deterministic=True):
        fail()
    assert not torch.are_deterministic_algorithms_enabled()
