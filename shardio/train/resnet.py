"""A small residual network (He et al., "Deep residual learning for image recognition", 2016)."""

from __future__ import annotations

import torch
from torch import nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; ``stride`` 2 halves the picture."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def small_resnet(num_classes: int, image_size: int, width: int = 32) -> nn.Sequential:
    """Return a residual network of one stem and one to five blocks.

    Args:
        num_classes: The number of outputs.
        image_size: Of the square images in pixels. Blocks halve the picture until it is 4 to 8 wide.
        width: Channels after the stem; doubled in each block, up to 8 times.
    """
    num_blocks = min(max(image_size.bit_length() - 4, 1), 5)
    stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    channels = [min(width * 2**i, 8 * width) for i in range(num_blocks + 1)]
    blocks = [ResidualBlock(channels[i], channels[i + 1], stride=2) for i in range(num_blocks)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], num_classes))
