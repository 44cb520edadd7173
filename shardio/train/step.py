"""TrainStep: from microbatches to steps of the optimiser."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardio.train.config import DTYPES, Precision

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Steps(Protocol):
    """What is asked of a learning rate schedule; torch's have it."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class LossHook(Protocol):
    """Something that is added to the loss before the gradients are computed."""

    def __call__(self, loss: torch.Tensor, step: TrainStep, /) -> torch.Tensor: ...


class TrainStep:
    """Take steps of an optimiser, each from one or several microbatches, as one large batch would.

    >>> model = nn.Linear(2, 3)
    >>> step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), accumulate=2)
    >>> batches = [(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]))] * 5
    >>> for (inputs, labels), ends_step in in_groups(batches, 2):
    ...     outputs, loss = step(inputs, labels, ends_step=ends_step)
    >>> step.num_steps
    3

    Args:
        model: From inputs to outputs; it may be wrapped in DistributedDataParallel, compiled or scripted.
        optimizer: Of its parameters.
        schedule: Learning rates, stepped after each step that was taken.
        precision: ``bf16`` and ``fp16`` compute under autocast, ``fp16`` with a GradScaler.
        accumulate: How many microbatches a full step has. Its gradients do not depend on this, which only keeps
            those of a group that is not full in a range for fp16: where a step ends, ``ends_step`` says.
        loss_fn: From outputs and labels to the mean loss of a sample.
        clip_norm: The largest norm of all gradients together.
        clip_value: The largest magnitude of each gradient.
        hooks: Add to the loss.

    Attributes:
        num_taken: Steps that were taken.
        lr: The learning rate of the last step.
        num_skipped: Steps that the GradScaler left out, because a gradient was not finite.
        scale: By what the loss is multiplied for fp16; 1 otherwise.
        grad_norm: The norm of the gradients of the last step before they were clipped, with ``clip_norm``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Steps | None = None,
        precision: Precision = "fp32",
        accumulate: int = 1,
        loss_fn: LossFunction = nn.functional.cross_entropy,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        hooks: Sequence[LossHook] = (),
    ) -> None:
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.precision, self.accumulate, self.loss_fn = precision, accumulate, loss_fn
        self.clip_norm, self.clip_value, self.hooks = clip_norm, clip_value, hooks
        self.parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.device = self.parameters[0].device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.scale = self.scaler.get_scale()
        self.num_taken = self.num_skipped = 0
        self.lr = float(optimizer.param_groups[0]["lr"])
        self.grad_norm: torch.Tensor | None = None
        self._first_size = self._num_samples = 0

    def __call__(
        self, inputs: torch.Tensor, labels: torch.Tensor, *, ends_step: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute on a microbatch; take a step, if it is the last one of its group.

        Returns:
            The outputs [N, …] and the mean loss of a sample, both without gradients.
        """
        self._first_size = self._first_size or len(labels)
        self._num_samples += len(labels)
        if ends_step:
            self._weigh_by_samples()
        with self._ranks_together(ends_step):
            with autocast(self.device, self.precision):
                outputs = self.model(inputs)
                loss = self.loss_fn(outputs, labels)
            total = loss
            for hook in self.hooks:
                total = hook(total, self)
            num_in_step = self._num_samples if ends_step else self._first_size * self.accumulate
            self.scaler.scale(total * (len(labels) / num_in_step)).backward()
        if ends_step:
            self._take_step()
        return outputs.detach(), loss.detach()

    @property
    def num_steps(self) -> int:
        """How many steps there have been, taken and skipped."""
        return self.num_taken + self.num_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return all but the model that a later step depends on. There is no state within a group."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "num_taken": self.num_taken,
            "num_skipped": self.num_skipped,
            "lr": self.lr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
            self.scale = self.scaler.get_scale()
        self.num_taken, self.num_skipped, self.lr = state["num_taken"], state["num_skipped"], state["lr"]

    def _take_step(self) -> None:
        self._first_size = self._num_samples = 0
        self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(self.parameters, self.clip_value)
        self.lr, scale = float(self.optimizer.param_groups[0]["lr"]), self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.scale = self.scaler.get_scale()
        if self.scale < scale:  # Which is how a GradScaler says that it left the step out.
            self.num_skipped += 1
            return
        self.num_taken += 1
        if self.schedule is not None:
            self.schedule.step()

    def _weigh_by_samples(self) -> None:
        """Weight the microbatches of a group by all its samples, before ranks exchange gradients.

        Until its last one comes, they do so by the samples of a full step, of microbatches like the first.
        """
        num_planned = self._first_size * self.accumulate
        if self._num_samples != num_planned:
            for weight in self.parameters:
                if weight.grad is not None:
                    weight.grad.mul_(num_planned / self._num_samples)

    def _ranks_together(self, ends_step: bool) -> AbstractContextManager[Any]:
        """Exchange gradients between ranks once a step, with its last microbatch."""
        return (
            nullcontext() if ends_step or not isinstance(self.model, DistributedDataParallel) else self.model.no_sync()
        )


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context in which a model computes in this precision."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def in_groups(batches: Iterable[Any], size: int) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and whether it is the last one of its group of ``size``; the last group may be shorter.

    It looks one batch ahead within a group, and never beyond its end: there, no batch has been taken that was not
    yielded, and a loader's state is that of the last one.
    """
    iterator = iter(batches)
    nothing = object()
    batch, place = next(iterator, nothing), 1
    while batch is not nothing:
        if place == size:
            yield batch, True
            batch, place = next(iterator, nothing), 1
        else:
            following = next(iterator, nothing)
            yield batch, following is nothing
            batch, place = following, place + 1
