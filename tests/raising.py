"""Check in one line that a call fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def assert_raises(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    message: str,
    call: Callable[..., object],
    /,
    *arguments: Any,
    **options: Any,
) -> None:
    """Call a function, which must raise an error whose text matches a pattern."""
    with pytest.raises(kind, match=message):
        call(*arguments, **options)
