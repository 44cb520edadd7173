"""What a training loop measures of itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """One epoch's figures.

    Attributes:
        epoch: Its number, from 0.
        loss: Mean training loss of a sample.
        accuracy: Share of the training samples classified rightly, while the model was learning.
        val_loss: Mean loss of a validation sample, or None.
        val_accuracy: Share of the validation samples classified rightly, or None.
        num_images: How many images were trained on.
        train_s: How long that took, in seconds.
        data_wait_s: How much of it the loop waited for the loader.
        lr: The learning rate at the end.
    """

    epoch: int
    loss: float
    accuracy: float
    val_loss: float | None
    val_accuracy: float | None
    num_images: int
    train_s: float
    data_wait_s: float
    lr: float

    @property
    def images_per_s(self) -> float:
        return self.num_images / self.train_s

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / self.train_s


class Score:
    """Sums the loss and the right answers on the device, so that nothing waits for it until it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        self.num_images = 0

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Count a batch by its mean loss, its outputs [N, classes] and labels [N]."""
        num_right = (outputs.detach().argmax(1) == labels).sum()
        self._sums += torch.stack([loss.detach() * len(labels), num_right]).to(self._sums)
        self.num_images += len(labels)

    @property
    def loss(self) -> float:
        """Mean loss of a sample."""
        return self._sums[0].item() / max(self.num_images, 1)

    @property
    def accuracy(self) -> float:
        """Share of right answers."""
        return self._sums[1].item() / max(self.num_images, 1)


class TimedBatches:
    """Iterates over batches and sums the time spent waiting for them, in ``wait_s``."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.wait_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        start = time.perf_counter()
        for batch in self._batches:
            self.wait_s += time.perf_counter() - start
            yield batch
            start = time.perf_counter()
