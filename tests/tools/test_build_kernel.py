from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardio.images.kernel.source import BUILT_FOLDER, hash_source
from shardio.images.kernel.targets import TARGETS

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(platform.machine() not in TARGETS, reason="there are no targets for this machine")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the files that the script needs, without shared objects."""
    for path in ("tools/build_kernel.py", "shardio/__init__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    shutil.copytree(ROOT / "shardio" / "images", tmp_path / "shardio" / "images", ignore=lambda *_: ["built"])
    return tmp_path


def build(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "tools/build_kernel.py"]
    return subprocess.run(
        command, cwd=checkout, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


def test_without_a_linker_it_says_what_to_install_and_writes_nothing(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = build(checkout, PATH=str(tmp_path / "empty"), CC="")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("install a C compiler, name one with CC, or run pip install ziglang")
    assert not list(checkout.rglob("*.so"))


def test_what_was_compiled_from_the_same_source_stays_and_all_else_is_removed(checkout: Path) -> None:
    folder = checkout / BUILT_FOLDER.relative_to(ROOT)
    folder.mkdir()
    present = {f"{target}-{hash_source()}.so" for target in TARGETS[platform.machine()]}
    for name in (*present, "x86-64-v3-0123456789abcdef.so", "x86-64-v3-0123456789abcdef.o", "x.partial"):
        (folder / name).touch()
    done = build(checkout)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in folder.iterdir()} == present
