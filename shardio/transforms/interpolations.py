"""Interpolations of transforms that move pixels, by the names that torchvision gives them."""

from __future__ import annotations

from shardio.images.kernel.compiled import operation_records as codes

INTERPOLATIONS = {"nearest": codes.NEAREST, "bilinear": codes.BILINEAR, "bicubic": codes.BICUBIC}
"""The numbers of interpolations by their names."""


def check_interpolation(interpolation: object) -> str:
    """Return the name of an interpolation, also for torchvision's or Pillow's constants, or raise ValueError."""
    value = getattr(interpolation, "value", interpolation)
    for name, number in INTERPOLATIONS.items():
        if value in (name, number):
            return name
    raise ValueError(f"interpolation must be 'nearest', 'bilinear' or 'bicubic', got {interpolation!r}")
