"""The mark by which ``remainder="mask"`` tells samples that count from repeats."""

from __future__ import annotations

from typing import Any


def mark_valid(sample: Any, is_valid: bool) -> Any:
    """Return a sample with the mark: last in a tuple, under the key ``valid`` of a dict, or beside a bare value."""
    if isinstance(sample, dict):
        return {**sample, "valid": is_valid}
    return (*sample, is_valid) if isinstance(sample, tuple) else (sample, is_valid)
