"""Fixtures that the tests of shards share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tars import write_tar


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """A directory without a manifest, with four tars of one to four samples each."""
    folder = tmp_path / "tars"
    folder.mkdir()
    for i in range(4):
        write_tar(folder / f"x-{i:06d}.tar", [(f"{i}-{j}.txt", b"%d" % j) for j in range(i + 1)])
    return folder


@pytest.fixture
def out(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "out"))
