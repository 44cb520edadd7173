from __future__ import annotations

import warnings

import pytest
from torch import nn

from shardio.train import TrainConfig, train
from shardio.train.hints import SizeHints
from tests.train.toys import make_batches


def _train(model: nn.Module, batch_size: int) -> None:
    config = TrainConfig(epochs=2, precision="bf16", device="cpu")
    train(model, make_batches([batch_size] * 2), config, callbacks=[SizeHints()])


def _model(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(108, hidden), nn.ReLU(), nn.Linear(hidden, 3))


def test_sizes_that_are_no_multiples_of_8_are_named_once() -> None:
    message = "half precision is fastest where sizes are multiples of 8: a batch has 6 samples, 1 has 13 outputs$"
    with pytest.warns(UserWarning, match=message) as caught:
        _train(_model(13), 6)
    assert len(caught) == 1


def test_there_is_no_hint_where_there_is_nothing_to_choose() -> None:
    """108 inputs and 3 classes are as they are."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _train(_model(16), 8)
