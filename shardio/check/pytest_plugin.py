"""A pytest plugin that provides the fixture ``assert_exactly_once``."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(name="assert_exactly_once")
def _assert_exactly_once() -> Callable[..., None]:
    """Assert that a loader delivers every sample exactly once.

    See shardio.check.assert_exactly_once.

    ::

        def test_my_loader(assert_exactly_once):
            assert_exactly_once(make_loader(num_workers=4), expected=1000, key="id")
    """
    from shardio.check import assert_exactly_once

    return assert_exactly_once
