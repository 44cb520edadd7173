"""Libraries of models. Tests that need one are skipped if it is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from shardio.libraries import import_library


def load(name: str) -> Any:
    """Import a library, or skip the test if it is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    return import_library(name)
