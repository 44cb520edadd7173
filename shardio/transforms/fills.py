"""Colours of pixels outside an image, as torchvision's ``fill`` gives them."""

from __future__ import annotations

from collections.abc import Sequence

Fill = float | Sequence[float] | None
"""One number for all colours, or three; None for black."""

Colour = tuple[int, int, int]
"""Red, green and blue."""


def check_fill(name: str, fill: Fill) -> Colour:
    """Return a colour as red, green and blue, or raise ValueError."""
    values = [0.0] * 3 if fill is None else [float(fill)] * 3 if isinstance(fill, int | float) else list(fill)
    values = values * 3 if len(values) == 1 else values
    if len(values) != 3 or not all(0 <= value <= 255 for value in values):
        raise ValueError(f"{name} must be a number from 0 to 255 or three of them, got {fill!r}")
    red, green, blue = map(int, values)
    return red, green, blue
