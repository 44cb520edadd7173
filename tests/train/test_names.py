"""The names of shardio.train, and those of its choices."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

import shardio.train
from shardio.train.config import OptimizerName, Precision, ScheduleName
from shardio.train.optimizers import FACTORS, OPTIMIZERS
from shardio.train.step import DTYPES


def test_all_public_names_can_be_loaded() -> None:
    assert all(getattr(shardio.train, name) is not None for name in shardio.train.__all__)
    assert dir(shardio.train) == shardio.train.__all__
    with pytest.raises(AttributeError, match=r"No shardio\.train attribute nothing"):
        shardio.train.nothing  # type: ignore[attr-defined]  # noqa: B018  # looking it up is the test


def test_the_settings_load_without_torch() -> None:
    """So the command line can show its options at once."""
    code = "import sys; from shardio.train import TrainConfig; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_choice_of_a_setting_is_implemented() -> None:
    assert set(OPTIMIZERS) == set(get_args(OptimizerName))
    assert set(FACTORS) == set(get_args(ScheduleName))
    assert set(DTYPES) == set(get_args(Precision))
