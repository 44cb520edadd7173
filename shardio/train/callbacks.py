"""What may be added to a training run without a change to its loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardio.train.meters import EpochResult, StepRecord
from shardio.world import find_world

if TYPE_CHECKING:
    from shardio.train.step import TrainStep


class Callback:
    """Does nothing: override what you need. All ranks call theirs, at the same places."""

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return what computes with the model's weights in its place, before ranks share its gradients."""
        return model

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        """Begin: behind so many whole epochs, and so many steps, of the run that is gone on with."""

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        """Return what the gradients of a microbatch are computed from, under autocast no more."""
        return loss

    def on_batch(self, batch: Any) -> None:
        """Look at a microbatch that was trained on, as it lies on the device."""

    def on_log(self, record: StepRecord) -> None:
        """Take note of some steps."""

    def on_epoch(self, result: EpochResult) -> None:
        """Take note of an epoch. Its checkpoint is written after all have done so."""

    def on_end(self, results: list[EpochResult]) -> None:
        """Take note of the end, with the results of all epochs."""


class PrintEpochs(Callback):
    """Says on rank 0 how each epoch went, in a line; ``say`` is told it."""

    def __init__(self, say: Callable[[str], object] = print) -> None:
        self.say = say if find_world().rank == 0 else _be_silent

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        if num_steps:
            self.say(f"going on from step {num_steps}, in epoch {num_epochs}")

    def on_epoch(self, result: EpochResult) -> None:
        self.say(result.describe())


def _be_silent(text: str) -> None:
    """Leave it to rank 0."""


class Compile(Callback):
    """Compile the model with torch.compile; ``options`` are its own. Checkpoints are those of the model as it is.

    Not ``Module.compile``, which leaves containers such as Sequential as they are.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def wrap_model(self, model: nn.Module) -> nn.Module:
        return cast(nn.Module, torch.compile(model, **self.options))


class GradientPenalty(Callback):
    """Add ``weight`` times the norm of the loss's gradient to the loss, for a smoother one.

    As in torch's "Automatic Mixed Precision examples": the gradient is taken of the scaled loss, so that nothing of it
    is lost in fp16, and scaled back before its norm is.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        scale = step.scale
        gradients = torch.autograd.grad(loss * scale, step.parameters, create_graph=True, materialize_grads=True)
        squares = [(gradient / scale).pow(2).sum() for gradient in gradients]
        # The root has no derivative at 0, where the loss is flat.
        return loss + self.weight * (torch.stack(squares).sum() + 1e-12).sqrt()
