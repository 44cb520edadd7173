from __future__ import annotations

import logging
from pathlib import Path

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


@pytest.mark.parametrize(("mode", "is_kept"), [(0o755, True), (0o775, False), (0o777, False)])
def test_code_is_kept_only_where_others_may_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int, is_kept: bool
) -> None:
    from numba.core import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    function = compiled(_add_up)
    folder = Path(function.stats.cache_path)  # type: ignore[attr-defined]  # It is numba's dispatcher.
    assert folder.parent == tmp_path
    folder.chmod(mode)
    with caplog.at_level(logging.WARNING, "shardio"):
        assert compiled(_add_up)(np.arange(10)) == 45
    assert (len(list(folder.iterdir())) > 0) == is_kept
    assert (f"the folder {folder} belongs to" in caplog.text) != is_kept
