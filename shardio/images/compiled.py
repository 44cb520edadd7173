"""Loops that numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function by numba; it releases the GIL. The code is kept on disk, where there is a place for it."""
    try:
        return njit(cache=True, nogil=True)(function)
    except RuntimeError:  # Neither this package's folder nor the user's cache folder can be written to.
        return njit(nogil=True)(function)
