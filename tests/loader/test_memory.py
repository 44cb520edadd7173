"""Anonymous shared memory."""

from __future__ import annotations

import pytest

from shardio.loader.memory import make_memory
from tests.files import count_open_files


def test_memory_that_cannot_be_allocated_leaves_no_descriptor() -> None:
    before = count_open_files()
    with pytest.raises(OSError, match="Invalid argument"):
        make_memory(-1)
    assert count_open_files() == before
