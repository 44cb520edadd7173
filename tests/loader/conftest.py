"""Fixtures that the tests of the loader share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardio.loader.fork_server import end_kept
from tests.buffers import find_fork_servers, pack_pictures


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of images whose crops are large enough for buffers."""
    return pack_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture
def no_process_of_other_tests() -> Iterator[None]:
    """End the processes that earlier tests left behind, because a test that counts processes must not count them."""
    gc.collect()  # Tracebacks of expected errors may keep loaders and their worker processes alive.
    end_kept()
    assert find_fork_servers() == set()
    yield
    end_kept()
