"""Machines on which nothing has been compiled or checked yet, for tests of the kernel's files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardio.images.kernel import cache_files, finding, loading
from shardio.images.kernel.source import built_path
from shardio.images.kernel.targets import find_targets

ROOT = Path(__file__).parents[2]

WITHOUT_BUILT = "from shardio.images.kernel import loading; loading.find_targets = lambda: []\n"
"""The first line of a script that runs as if shardio had been built without functions for this processor."""


def object_path() -> Path:
    """Return the path of the object file that the build has left, with the functions for this processor."""
    for target in find_targets():
        if (path := built_path(target).with_suffix(".o")).exists():
            return path
    pytest.skip("python tools/build_kernel.py has left no object file for this processor")


def start(code: str, cache: Path, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def run(code: str, cache: Path, *arguments: object) -> tuple[str, str]:
    """Run a script with ``cache`` as the folder for caches. Return its output and its errors."""
    process = start(code, cache, *arguments)
    found = process.communicate(timeout=60)
    assert process.returncode == 0, found
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(cache_files, "site_cache_path", lambda name: tmp_path / "system" / name)
    monkeypatch.setattr(finding, "_finder", finding._Finder())
    return cache_files.user_folder()


@pytest.fixture
def _not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the built functions for this processor, so that numba compiles them."""
    pytest.importorskip("numba")
    monkeypatch.setattr(loading, "find_targets", list)
    monkeypatch.setattr(finding, "_finder", finding._Finder())


@pytest.fixture
def _no_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it impossible to create the user's folder, and fail if a process is started."""
    folder.parents[1].touch()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("the outcome cannot be written"))
