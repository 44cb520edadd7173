"""The storage backends that pass the conformance suite. A new backend adds a line to BACKENDS."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from shardio.storage import Location, make_access, parse_location

BACKENDS: dict[str, Callable[[Path], Location]] = {
    "local": parse_location,
    "memory": lambda folder: parse_location(f"memory://{uuid.uuid4().hex}/{folder.name}"),
    "cached": lambda folder: parse_location(
        f"memory://{uuid.uuid4().hex}/{folder.name}", make_access(cache=folder / "cache", cache_size="100MB")
    ),
}
"""For each backend, a function that returns an empty folder. It may use a local directory."""


@pytest.fixture(params=BACKENDS)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """An empty folder of each backend."""
    return BACKENDS[request.param](tmp_path)
