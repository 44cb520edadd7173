"""Callbacks: additions to a training run that leave its loop unchanged."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from shardio.train.meters import EpochResult, StepRecord
from shardio.world import find_world

if TYPE_CHECKING:
    from shardio.train.step import TrainStep


class Callback:
    """The base class of callbacks. Its methods do nothing: override those that you need.

    Every rank calls its own callbacks, at the same points.
    """

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the model or a wrapper that uses its weights. Called once, before DistributedDataParallel."""
        return model

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        """Handle the start of training, given the numbers of complete epochs and steps, both 0 in a new run."""

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        """Return the loss to compute a microbatch's gradients from. Called outside autocast."""
        return loss

    def on_batch(self, batch: Any) -> None:
        """Handle a microbatch, on the device, after the model was trained on it."""

    def on_log(self, record: StepRecord) -> None:
        """Handle the metrics of the steps since the last call."""

    def on_epoch(self, result: EpochResult) -> None:
        """Handle the metrics of an epoch, before its checkpoint is written."""

    def on_end(self, results: list[EpochResult]) -> None:
        """Handle the metrics of all epochs at the end of training."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, such as averaged weights. Checkpoints hold that of rank 0.

        It may contain tensors, numpy arrays, numbers, strings, and dicts, lists, tuples and sets of these.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, unless it was empty. Called before :meth:`on_start`."""
        raise NotImplementedError(f"{type(self).__name__} has a state_dict, so it needs a load_state_dict")


def name_callbacks(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return callbacks by names that are the same in a resumed run: their classes, numbered where one has several."""
    named: dict[str, Callback] = {}
    counts = Counter[str]()
    for callback in callbacks:
        name = type(callback).__qualname__
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name} {counts[name]}"] = callback
    return named


class PrintEpochs(Callback):
    """A callback that prints one line per epoch on rank 0. ``say`` replaces ``print``."""

    def __init__(self, say: Callable[[str], object] = print) -> None:
        self.say = say if find_world().rank == 0 else _say_nothing

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        if num_steps:
            self.say(f"resuming after step {num_steps} (complete epochs: {num_epochs})")

    def on_epoch(self, result: EpochResult) -> None:
        self.say(result.describe())


def _say_nothing(text: str) -> None:
    pass


class Compile(Callback):
    """A callback that compiles the model with ``torch.compile(model, **options)``.

    Checkpoints hold the uncompiled model.
    """

    # Module.compile would not compile containers such as Sequential.

    def __init__(self, **options: Any) -> None:
        self.options = options

    def wrap_model(self, model: nn.Module) -> nn.Module:
        return cast(nn.Module, torch.compile(model, **self.options))


class GradientPenalty(Callback):
    """A callback that adds ``weight`` times the gradient's norm to the loss, to smooth it.

    As in torch's "Automatic Mixed Precision examples", the gradient is computed from the scaled
    loss, so that fp16 does not underflow, and unscaled before its norm is computed.
    """

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def add_to_loss(self, loss: torch.Tensor, step: TrainStep) -> torch.Tensor:
        scale = step.scale
        gradients = torch.autograd.grad(loss * scale, step.parameters, create_graph=True, materialize_grads=True)
        squares = [(gradient / scale).pow(2).sum() for gradient in gradients]
        # The square root has no derivative at 0, where the loss is flat.
        return loss + self.weight * (torch.stack(squares).sum() + 1e-12).sqrt()


class SizeHints(Callback):
    """A callback that warns once about layer and batch sizes that leave a GPU's tensor cores idle.

    Sizes should be multiples of 8 (NVIDIA, "Train With Mixed Precision", "Tensor Core shape
    constraints"). The image channels and the number of classes are exempt, because the task fixes
    them.
    """

    def __init__(self) -> None:
        self._odd: list[str] | None = []

    def wrap_model(self, model: nn.Module) -> nn.Module:
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
        self._odd = [
            f"{name or type(layer).__name__} has {size} outputs"
            for name, layer in layers[:-1]
            if (size := layer.weight.shape[0]) % 8
        ]
        return model

    def on_batch(self, batch: Any) -> None:
        if self._odd is None:
            return
        odd, self._odd = self._odd, None
        if len(batch[1]) % 8:
            odd.insert(0, f"a batch has {len(batch[1])} samples")
        if odd:
            more = f", and {len(odd) - 5} more" if len(odd) > 5 else ""
            warnings.warn(
                f"half precision is slower with sizes that are not multiples of 8: {', '.join(odd[:5])}{more}",
                stacklevel=2,
            )
