"""Sizes as text."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Return a size as text.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
