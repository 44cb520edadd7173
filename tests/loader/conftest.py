"""Data that the tests of the loader share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slots import pack_pictures


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of images whose crops are large enough for slots."""
    return pack_pictures(tmp_path_factory.mktemp("pictures"))
