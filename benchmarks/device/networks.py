"""Networks to train: torchvision's ResNets, or networks with the same layers if torchvision is not installed."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import torch
from torch import nn

DEPTHS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
"""The number of blocks in each stage (He et al., "Deep residual learning for image recognition", 2016, table 1)."""

NUM_CLASSES = 1000
WIDTH = 64
"""The number of channels of the first stage."""


class Block(nn.Module):
    """Convolutions with a shortcut.

    There are two 3x3 convolutions. In deep networks, there is a 3x3 convolution between two 1x1 convolutions, the
    second of which has four times as many channels.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, *, is_deep: bool) -> None:
        super().__init__()
        inner = out_channels // 4 if is_deep else out_channels
        if is_deep:
            shapes = [(in_channels, inner, 1, 1), (inner, inner, 3, stride), (inner, out_channels, 1, 1)]
        else:
            shapes = [(in_channels, inner, 3, stride), (inner, out_channels, 3, 1)]
        layers = [layer for shape in shapes for layer in (_convolve(*shape), nn.ReLU(inplace=True))]
        self.layers = nn.Sequential(*layers[:-1])  # The last ReLU follows the sum.
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = _convolve(in_channels, out_channels, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu_(self.layers(x) + self.shortcut(x))


def make_network(name: str, width: int = WIDTH) -> tuple[nn.Module, str]:
    """Return a network for images of 224×224 pixels, and a description of its origin.

    Args:
        name: ``resnet18`` or ``resnet50``.
        width: The number of channels of the first stage; torchvision has only networks with 64.
    """
    if width == WIDTH:
        try:
            models: Any = importlib.import_module("torchvision.models")
            return getattr(models, name)(weights=None), "torchvision"
        except Exception as error:  # torchvision may raise any error if it was built for a different torch version.
            return _make_own(name, width), f"the benchmark's own, because torchvision cannot be imported ({error})"
    return _make_own(name, width), f"the benchmark's own, {width} channels wide"


def _make_own(name: str, width: int) -> nn.Sequential:
    is_deep = name == "resnet50"
    channels = [width * 2**stage * (4 if is_deep else 1) for stage in range(4)]
    blocks = []
    for stage, (before, after) in enumerate(pairwise([width, *channels])):
        for place in range(DEPTHS[name][stage]):
            stride = 2 if stage and not place else 1
            blocks.append(Block(after if place else before, after, stride, is_deep=is_deep))
    stem = [_convolve(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], NUM_CLASSES))


def _convolve(in_channels: int, out_channels: int, size: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, out_channels, size, stride, size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))
