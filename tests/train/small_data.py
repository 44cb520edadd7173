"""Small batches and models for tests of training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
"""A normalisation that only divides by 255."""


def make_batches(sizes: Sequence[int], *, num_classes: int = 3, side: int = 6, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 256, (size, 3, side, side), dtype=torch.uint8, generator=generator),
            torch.randint(0, num_classes, (size,), generator=generator),
        )
        for size in sizes
    ]


def make_separable_batches(num_batches: int, batch_size: int = 20, seed: int = 0) -> list[Batch]:
    """Return batches of three classes: noise in which red, green or blue is the brightest."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        labels = torch.randint(0, 3, (batch_size,), generator=generator)
        images = torch.randint(0, 120, (batch_size, 3, 6, 6), dtype=torch.uint8, generator=generator)
        images[torch.arange(batch_size), labels] += 100
        batches.append((images, labels))
    return batches


def join(batches: Sequence[Batch]) -> Batch:
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def make_linear(num_classes: int = 3, side: int = 6, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, num_classes))


def make_network(num_classes: int = 3, side: int = 6, seed: int = 0) -> nn.Sequential:
    """Return a network with one hidden layer, whose outputs depend on each sample alone."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 16), nn.Tanh(), nn.Linear(16, num_classes))


class Poison(nn.Module):
    """Turn inputs into NaN from this forward pass on; the first pass is pass 1."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.num_passes = first, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.num_passes += 1
        return images * float("nan") if self.num_passes >= self.first else images


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]
