"""Compiling the kernel checks that its pixels are those of the libraries; otherwise it is not used."""

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

from shardio.images.kernel.checking import _PLANS, find_difference
from shardio.images.kernel.loading import Kernel, kernel_name, kernel_path, read_kernel

ROOT = Path(__file__).parents[2]

NUM_FILES = 24
"""JPEGs that are rendered by each plan: six samplings, two qualities, untiled and tiled."""


@pytest.fixture
def ready() -> tuple[str, bytes]:
    """The kernel that was compiled at the start of the tests."""
    kernel = read_kernel()
    assert kernel is not None
    return kernel


class DifferentKernel(Kernel):
    """A kernel that renders one image differently."""

    image, value = 3, 1

    def decode(self, contents: Any, plans: Any, order: Any, rows: Any) -> NDArray[np.bool_]:
        is_drawn = super().decode(contents, plans, order, rows)
        rows[self.image, 5, 7, 2] ^= self.value
        is_drawn[self.image] &= self.value > 0
        return is_drawn


def test_nothing_differs_on_this_machine(ready: tuple[str, bytes]) -> None:
    assert find_difference(Kernel(*ready)) is None


@pytest.mark.parametrize("plan", range(len(_PLANS)))
def test_every_plan_is_checked(ready: tuple[str, bytes], plan: int) -> None:
    different = DifferentKernel(*ready)
    different.image = NUM_FILES * plan + 3
    top, left, height, width, new_height, new_width = _PLANS[plan].tolist()[:6]
    message = f"444, quality 95, tiled, {[top, left, height, width]} to {[new_height, new_width]}: 1 of 29088 values"
    assert find_difference(different) == f"{message} differ by up to 1"


def test_an_image_that_is_not_rendered_is_a_difference(ready: tuple[str, bytes]) -> None:
    different = DifferentKernel(*ready)
    different.image, different.value = 0, 0
    assert find_difference(different) == "444, quality 60, [20, 30, 96, 101] to [96, 101]: not rendered"


def test_a_kernel_is_not_used_where_opencv_rounds_differently_and_its_file_says_so(tmp_path: Path) -> None:
    code = f"""
import cv2
from pathlib import Path
from shardio.images.kernel import building, find_kernel, loading, prepare_kernel
whole = loading.unpack_kernel(Path("{kernel_path()}").read_bytes())
building._compile = lambda: print("compiled") or whole
resize = cv2.resize
cv2.resize = lambda image, *size, **options: resize(image, *size, **options) ^ 1
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
        assert line.startswith("shardio does not use its JPEG kernel on this machine, because its pixels differ from")
        assert "444, quality 60, [0, 0, 150, 203] to [96, 101]: 29088 of 29088 values differ by up to 1" in line


def test_another_version_of_a_library_needs_another_check(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = kernel_name()
    monkeypatch.setattr(simplejpeg, "__version__", "1.2.3")
    other = kernel_name.__wrapped__()
    monkeypatch.setattr(cv2, "getBuildInformation", lambda: "Custom HAL: YES")
    assert len({usual, other, kernel_name.__wrapped__()}) == 3
