"""Compiling the kernel checks that its pixels are those of the libraries; otherwise it is not used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import simplejpeg
from numpy.typing import NDArray

from shardio.images.kernel import checking, compiled_functions
from shardio.images.kernel.cache_files import check_name
from shardio.images.kernel.checking import _PLANS, find_difference
from shardio.images.kernel.functions import Kernel
from tests.images.kernel_machines import run

NUM_FILES = 24
"""JPEGs that are rendered by each plan: six samplings, two qualities, untiled and tiled."""


@pytest.fixture
def different(monkeypatch: pytest.MonkeyPatch) -> type[Kernel]:
    """A kernel that renders one image differently; it is checked in place of the usual one."""

    class Different(Kernel):
        image, value = 3, 1

        def decode(self, contents: Any, plans: Any, order: Any, rows: Any, turns: Any = None) -> NDArray[np.bool_]:
            is_drawn = super().decode(contents, plans, order, rows, turns)
            rows[self.image, 5, 7, 2] ^= self.value
            is_drawn[self.image] &= self.value > 0
            return is_drawn

    monkeypatch.setattr(checking, "Kernel", Different)
    return Different


def test_nothing_differs_on_this_machine() -> None:
    assert find_difference(compiled_functions()) is None


@pytest.mark.parametrize("plan", range(len(_PLANS)))
def test_every_plan_is_checked(different: Any, plan: int) -> None:
    different.image = NUM_FILES * plan + 3
    top, left, height, width, new_height, new_width = _PLANS[plan].tolist()[:6]
    message = f"444, quality 95, tiled, {[top, left, height, width]} to {[new_height, new_width]}: 1 of 29088 values"
    assert find_difference(compiled_functions()) == f"{message} differ by up to 1"


def test_an_image_that_is_not_rendered_is_a_difference(different: Any) -> None:
    different.image, different.value = 0, 0
    assert find_difference(compiled_functions()) == "444, quality 60, [20, 30, 96, 101] to [96, 101]: not rendered"


def test_a_kernel_with_other_pixels_is_not_used_and_a_file_says_so(tmp_path: Path) -> None:
    code = """
from shardio.images.kernel import building, checking, find_kernel, prepare_kernel
resize, check = checking.resize_bilinear, checking.find_difference
checking.resize_bilinear = lambda image, *size: resize(image, *size) ^ 1
checking.find_difference = lambda functions: print("checked") or check(functions)
building.build()
__import__("subprocess").Popen = None
prepare_kernel()
print(find_kernel())
"""
    for expected in ("checked\nNone\n", "None\n"):
        output, errors = run(code, tmp_path)
        assert output == expected
        (line,) = errors.splitlines()
        assert line.startswith("shardio does not use its JPEG kernel on this machine, because its pixels differ from")
        assert "444, quality 60, [20, 30, 96, 101] to [96, 101]: 29088 of 29088 values differ by up to 1" in line


def test_another_processor_or_version_of_a_library_needs_another_check(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [check_name("it"), check_name("other")]
    monkeypatch.setattr(simplejpeg, "__version__", "1.2.3")
    names.append(check_name.__wrapped__("it"))
    monkeypatch.setattr(PIL, "__version__", "1.2.3")
    names.append(check_name.__wrapped__("it"))
    monkeypatch.setattr("shardio.images.kernel.cache_files.describe_processor", lambda: "another one")
    names.append(check_name.__wrapped__("it"))
    assert len(set(names)) == len(names)
