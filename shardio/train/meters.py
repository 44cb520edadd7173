"""What a training loop measures of itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardio.train.ranks import sum_over_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A line of the log: the steps since the line before.

    Attributes:
        step: How many steps there have been, taken and skipped.
        epoch: The epoch, from 0.
        loss: Mean loss of a sample, over all ranks.
        lr: The learning rate of the last step.
        scale: By what the loss is multiplied for fp16; 1 otherwise.
        num_skipped: Steps that were skipped so far, since a gradient was not finite.
        images_per_s: Of all ranks together.
        step_s: Duration of a step in seconds.
        data_wait_share: Which share of it this rank waited for the loader.
        memory_allocated: Bytes, see :class:`shardio.train.memory.Memory`; None where they cannot be told.
        memory_reserved: Likewise.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    scale: float
    num_skipped: int
    images_per_s: float
    step_s: float
    data_wait_share: float
    memory_allocated: int | None
    memory_reserved: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """One epoch's figures, over all ranks.

    Attributes:
        epoch: Its number, from 0.
        step: How many steps there have been by its end, taken and skipped.
        loss: Mean training loss of a sample.
        accuracy: Share of the training samples classified rightly, while the model was learning.
        val_loss: Mean loss of a validation sample, or None.
        val_accuracy: Share of the validation samples classified rightly, or None.
        num_images: How many images were trained on.
        train_s: How long that took, in seconds.
        data_wait_s: How much of it this rank waited for the loader.
        lr: The learning rate of the last step.
        is_best: Whether no epoch before had so low a loss: of validation, if there is any.
    """

    epoch: int
    step: int
    loss: float
    accuracy: float
    val_loss: float | None
    val_accuracy: float | None
    num_images: int
    train_s: float
    data_wait_s: float
    lr: float
    is_best: bool

    @property
    def images_per_s(self) -> float:
        return self.num_images / max(self.train_s, 1e-9)

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / max(self.train_s, 1e-9)

    def describe(self) -> str:
        """Return a line for people."""
        validation = (
            "" if self.val_loss is None else f"val loss {self.val_loss:.3f}  val accuracy {self.val_accuracy:.1%}  "
        )
        return (
            f"epoch {self.epoch}  loss {self.loss:.3f}  accuracy {self.accuracy:.1%}  {validation}"
            f"{self.images_per_s:.0f} images/s  waiting for data {self.data_wait_share:.0%}"
        )

    @property
    def judged_by(self) -> float:
        """The loss by which epochs are compared."""
        return self.loss if self.val_loss is None else self.val_loss


class Score:
    """Sums the loss and the right answers on the device, so that nothing waits for it until it is asked."""

    def __init__(self, device: torch.device) -> None:
        # MPS has no float64.
        self.sums = torch.zeros(3, dtype=torch.float64, device="cpu" if device.type == "mps" else device)

    def add(
        self, losses: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Count samples by their losses [N], outputs [N, classes] and labels [N], where ``valid`` [N] is true."""
        valid = torch.ones_like(labels, dtype=torch.bool) if valid is None else valid
        right = (outputs.argmax(1) == labels) & valid
        loss = losses.to(self.sums).masked_fill(~valid.to(self.sums.device), 0).sum()
        self.sums += torch.stack([loss, right.sum().to(self.sums), valid.sum().to(self.sums)])

    def over_ranks(self) -> Score:
        """Return the score of all ranks together."""
        score = Score(self.sums.device)
        score.sums = sum_over_ranks(self.sums)
        return score

    @property
    def num_images(self) -> int:
        """How many samples were counted."""
        return int(self.sums[2].item())

    @property
    def loss(self) -> float:
        """Mean loss of a sample."""
        return self.sums[0].item() / max(self.num_images, 1)

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self.sums[1].item() / max(self.num_images, 1)


class Interval:
    """The time since the last line of the log, and how much of it went into waiting for data.

    Attributes:
        start: When it began, by ``time.perf_counter``.
        wait_s: Seconds spent waiting for batches.
        num_steps: Steps since.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self.start, self.wait_s, self.num_steps = time.perf_counter(), 0.0, 0

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches, and count how long they take to come."""
        start = time.perf_counter()
        for batch in batches:
            self.wait_s += time.perf_counter() - start
            yield batch
            start = time.perf_counter()
