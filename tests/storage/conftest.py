"""The storage backends that pass the conformance suite. A new backend adds a line to BACKENDS."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from shardio.storage import Location, parse_location
from tests.storage.memory_store import MemoryStore

BACKENDS: dict[str, Callable[[Path], Location]] = {
    "local": parse_location,
    "memory": lambda folder: Location(store=MemoryStore(name=uuid.uuid4().hex), key=folder.name),
}
"""For each backend, a function that returns an empty folder. It may use a local directory."""


@pytest.fixture(params=BACKENDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty folder of each backend."""
    return BACKENDS[request.param](tmp_path)
