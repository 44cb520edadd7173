"""Datasets that MosaicML Streaming's ``MDSWriter`` writes. Tests that import this module need Streaming."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardio.libraries import import_torchvision
from tests.sources import encode

if find_spec("streaming") is not None:
    import_torchvision()  # Streaming imports it.
streaming = pytest.importorskip("streaming")


def write(folder: Path, columns: dict[str, str], samples: Any, **options: Any) -> Path:
    """Write a dataset with several shards."""
    with streaming.MDSWriter(out=str(folder), columns=columns, **{"size_limit": 1 << 16, **options}) as writer:
        for sample in samples:
            writer.write(sample)
    return folder


def write_simple(folder: Path, num: int = 12, **options: Any) -> Path:
    samples = ({"image": encode(seed), "label": seed % 3} for seed in range(num))
    return write(folder, {"image": "jpeg", "label": "int"}, samples, **{"size_limit": 1 << 12, **options})
