from __future__ import annotations

import numpy as np
import pytest

from shardio.images.compiled import compiled


def _add_up(values):  # type: ignore[no-untyped-def]  # numba finds the types
    total = np.int64(0)
    for value in values:
        total += value
    return total


def test_a_function_is_compiled_even_where_its_code_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching

    values = np.arange(10)
    assert compiled(_add_up)(values) == 45
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert compiled(_add_up)(values) == 45
