"""Data that the tests of faults share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardio
from tests.faults.hosts import Data
from tests.sources import write_images


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """96 images of 3 classes, in a directory, and in shards of at most 11."""
    root = tmp_path_factory.mktemp("faults")
    write_images(root / "images", per_class=32, width=64, height=64)
    shardio.pack(root / "images", root / "shards", max_shard_samples=11)
    return Data(images=root / "images", shards=root / "shards")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory from which hosts that start from here on import modules before all others, sitecustomize as well."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(Path(shardio.__file__).parents[1])]))
    return folder
