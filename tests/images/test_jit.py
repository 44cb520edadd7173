from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from shardio.images.jit import cached_jit


def _add_up(values):  # type: ignore[no-untyped-def]  # numba infers the types
    total = np.int64(0)
    for value in values:
        total += value
    return total


def test_a_function_is_compiled_even_if_its_code_cannot_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching

    values = np.arange(10)
    assert cached_jit(_add_up)(values) == 45
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    assert cached_jit(_add_up)(values) == 45


@pytest.mark.parametrize(("mode", "is_cached"), [(0o755, True), (0o775, False), (0o777, False)])
def test_code_is_cached_only_where_other_users_may_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int, is_cached: bool
) -> None:
    from numba.core import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    function = cached_jit(_add_up)
    folder = Path(function.stats.cache_path)  # type: ignore[attr-defined]  # It is numba's dispatcher.
    assert folder.parent == tmp_path
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING, "shardio"):
        assert cached_jit(_add_up)(np.arange(10)) == 45
    assert (len(list(folder.iterdir())) > 0) == is_cached
    assert (f"the folder {folder} belongs to" in caplog.text) != is_cached
