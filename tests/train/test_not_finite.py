"""A loss or a weight that is NaN or infinite stops the run, and is never saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardio.errors import NonFiniteLossError
from shardio.train import Callback, TrainConfig, TrainStep, load_checkpoint, train
from tests.train.runs import (
    make_config,
    make_loader,
    make_model,
)
from tests.train.small_data import Poison, make_batches, make_linear

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.mark.parametrize("log_every", [1, 2, 10])
def test_the_error_of_a_nan_loss_names_its_step_its_keys_and_the_remedy(
    packed: Path, tmp_path: Path, log_every: int
) -> None:
    """In batch 9, which is the first half of step 5 (step 2 of epoch 1). The checkpoint before it is finite."""
    keys: list[list[str]] = []

    class Keys(Callback):
        def on_batch(self, batch: Any) -> None:
            keys.append(list(batch[2]))

    model = nn.Sequential(Poison(9), *make_model())
    with pytest.raises(NonFiniteLossError, match=r"the loss of step 5 is nan \(samples: class-") as caught:
        train(
            model,
            make_loader(packed),
            make_config(tmp_path, checkpoint_every=2, log_every=log_every),
            callbacks=[Keys()],
        )
    assert caught.value.step == 5
    assert list(caught.value.keys or ()) == list(keys[8])
    assert f"{tmp_path}/last.pt holds the weights of step 4" in str(caught.value)
    state = load_checkpoint(tmp_path / "last.pt")
    assert state["step"]["num_taken"] == 4
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


def test_an_infinite_loss_stops_a_run_without_a_directory() -> None:
    batches = [(images.float() * float("inf"), labels) for images, labels in make_batches([4, 4])]
    config = TrainConfig(epochs=1, precision="fp32", device="cpu")
    with pytest.raises(
        NonFiniteLossError, match=r"samples unknown, .* Start a new run with a lower learning rate"
    ) as caught:
        train(make_linear(), batches, config)
    assert caught.value.keys is None


class _BadGradient(Callback):
    """Make the gradients of a step NaN, but not its loss."""

    def __init__(self, step: int) -> None:
        self.step = step

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        return loss * float("nan") if step.num_steps == self.step else loss


@pytest.mark.parametrize("step", [3, 5])
def test_nan_weights_are_never_saved(packed: Path, tmp_path: Path, step: int) -> None:
    """Neither after step 4, where the last checkpoint is of step 2, nor at the end of an epoch."""
    config = make_config(tmp_path, checkpoint_every=2, log_every=1)
    message = f"weights are NaN or infinite after step {step + 1}, because a gradient was not finite. Start a new run"
    with pytest.raises(NonFiniteLossError, match=message):
        train(make_model(), make_loader(packed), config, callbacks=[_BadGradient(step)])
    for name in ("last.pt", "best.pt"):
        state = load_checkpoint(tmp_path / name)
        assert all(tensor.isfinite().all() for tensor in state["model"].values())
