"""A function that checks, in one line, that a call fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

E = TypeVar("E", bound=BaseException)


def assert_raises(
    kind: type[E] | tuple[type[E], ...],
    message: str | None,
    call: Callable[..., object],
    /,
    *arguments: Any,
    **options: Any,
) -> E:
    """Return the error that a call must raise. The error's text must match a pattern."""
    with pytest.raises(kind, match=message) as caught:
        call(*arguments, **options)
    try:
        return caught.value
    finally:
        del caught  # This breaks a cycle that would keep the objects in the error's frames alive.
