"""Whether the kernel may be used is seen when it is compiled: only where its pixels are those of the libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray

from shardio.images.kernel.checking import find_difference
from shardio.images.kernel.loading import Kernel, kernel_name, kernel_path, read_kernel

ROOT = Path(__file__).parents[2]


@pytest.fixture
def ready() -> tuple[str, bytes]:
    """The kernel as it was compiled when the tests began."""
    kernel = read_kernel()
    assert kernel is not None
    return kernel


class Other(Kernel):
    """A kernel of which one image is otherwise."""

    image, value = 3, 1

    def decode(self, contents: Any, plans: Any, order: Any, rows: Any) -> NDArray[np.bool_]:
        is_drawn = super().decode(contents, plans, order, rows)
        rows[self.image, 5, 7, 2] ^= self.value
        is_drawn[self.image] &= self.value > 0
        return is_drawn


def test_here_nothing_differs(ready: tuple[str, bytes]) -> None:
    assert find_difference(Kernel(*ready)) is None


def test_any_image_is_looked_at(ready: tuple[str, bytes]) -> None:
    other = Other(*ready)
    said = "444, quality 95, tiled, [20, 30, 96, 101] to [96, 101]: 1 of 29088 values, by 1 at the most"
    assert find_difference(other) == said
    other.image, other.value = 0, 0
    assert find_difference(other) == "444, quality 60, [20, 30, 96, 101] to [96, 101]: not drawn"


def test_where_opencv_rounds_otherwise_it_is_not_used_and_that_is_said_and_remembered(tmp_path: Path) -> None:
    code = f"""
import shardio.images.resizing as resizing
from pathlib import Path
from shardio.images.kernel import building, find_kernel, loading, prepare_kernel
whole = loading.unpack_kernel(Path("{kernel_path()}").read_bytes())
building._compile = lambda: print("compiled") or whole
resize = resizing.cv2.resize
resizing.cv2.resize = lambda image, *size, **options: resize(image, *size, **options) ^ 1
path = building.build()
__import__("subprocess").Popen = None
prepare_kernel()
print(find_kernel(), len(path.read_bytes()) < 300)
"""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for output in ("compiled\nNone True\n", "None True\n"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        assert done.stdout == output
        (line,) = done.stderr.splitlines()
        assert line.startswith("shardio's JPEG decoder is not used on this machine, since its pixels are not those of")
        assert "444, quality 60, [0, 0, 150, 203] to [96, 101]: 29088 of 29088 values, by 1 at the most" in line


def test_another_library_needs_another_check(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = kernel_name()
    monkeypatch.setattr(simplejpeg, "__version__", "1.2.3")
    other = kernel_name.__wrapped__()
    monkeypatch.setattr(cv2, "getBuildInformation", lambda: "Custom HAL: YES")
    assert len({usual, other, kernel_name.__wrapped__()}) == 3
