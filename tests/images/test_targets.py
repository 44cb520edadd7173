"""A processor gets the fastest code that it supports, after a check that the code gives the libraries' pixels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
import simplejpeg
from numpy.typing import NDArray

from shardio.images.kernel import checking, compiled_functions, loading, targets
from shardio.images.kernel.cache_files import check_name
from shardio.images.kernel.checking import _PLANS, find_difference
from shardio.images.kernel.functions import Kernel
from shardio.images.kernel.source import built_path
from shardio.images.kernel.targets import TARGETS, describe_processor, find_targets

NEHALEM = "fpu sse sse2 ht pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
HASWELL = f"{NEHALEM} abm avx avx2 bmi1 bmi2 f16c fma movbe xsave"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"


def cpuinfo(*processors: dict[str, str]) -> str:
    return "\n\n".join("\n".join(f"{name}\t: {value}" for name, value in one.items()) for one in processors) + "\n\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate an x86-64 machine. Return the path of the file that describes its processors."""
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(targets, "_CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(targets, "_read_cpuinfo", targets._read_cpuinfo.__wrapped__)
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse sse2", []),
        (NEHALEM, ["x86-64-v2"]),
        (HASWELL, ["x86-64-v3", "x86-64-v2"]),
        (HASWELL.replace("fma ", ""), ["x86-64-v2"]),
        (SKYLAKE, ["x86-64-v4", "x86-64-v3", "x86-64-v2"]),
        (SKYLAKE.replace(" avx512vl", ""), ["x86-64-v3", "x86-64-v2"]),
    ],
)
def test_a_processor_runs_the_code_whose_instructions_it_has(machine: Path, flags: str, expected: list[str]) -> None:
    machine.write_text(cpuinfo({"processor": "0", "flags": flags}))
    assert find_targets() == expected


def test_arm_processors_have_one_target(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    machine.write_text(cpuinfo({"processor": "0", "Features": "fp evtstrm aes"}))
    assert find_targets() == ["aarch64"]


def test_where_nothing_describes_the_processor_it_runs_no_built_code(machine: Path) -> None:
    assert find_targets() == []
    assert loading.load_built() is None


def test_processors_of_a_machine_are_described_alike_and_other_ones_are_not(machine: Path) -> None:
    one = {"processor": "0", "model name": "Fast", "cpu MHz": "2200", "apicid": "0", "flags": HASWELL}
    texts = []
    for processor in (one, {**one, "processor": "3", "cpu MHz": "800", "apicid": "6"}, {**one, "model name": "New"}):
        machine.write_text(cpuinfo(processor, one))
        texts.append(describe_processor())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("target", [target for names in TARGETS.values() for target in names])
def test_no_pixel_differs_on_any_target(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if target not in find_targets():
        pytest.skip("this processor does not run it")
    monkeypatch.setattr(loading, "find_targets", lambda: [target])
    functions = loading.load_built()
    assert functions is not None
    assert functions.name == built_path(target).name
    assert find_difference(functions) is None


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm, of GNU binutils, lists the symbols")
def test_built_code_needs_no_python_and_only_an_old_c_library() -> None:
    for target in find_targets():
        listed = subprocess.run(["nm", "-D", built_path(target)], capture_output=True, text=True, check=True).stdout
        needed = {line.split()[-1].partition("@") for line in listed.splitlines() if " U " in line}
        assert {name for name, _, _ in needed} <= {"log10", "memcpy", "memset"}
        versions = [tuple(map(int, version.removeprefix("GLIBC_").split("."))) for _, _, version in needed]
        assert max(versions) <= (2, 17)


NUM_FILES = 24
"""The number of JPEGs that the check renders with each plan: six samplings, two qualities, untiled and tiled."""


@pytest.mark.parametrize("plan", [0, len(_PLANS) - 1])
def test_an_image_that_differs_or_is_not_rendered_is_found(monkeypatch: pytest.MonkeyPatch, plan: int) -> None:
    class Different(Kernel):
        image, value = NUM_FILES * plan + 3, 1

        def decode(self, contents: Any, plans: Any, order: Any, rows: Any, turns: Any = None) -> NDArray[np.bool_]:
            is_drawn = super().decode(contents, plans, order, rows, turns)
            rows[self.image, 5, 7, 2] ^= self.value
            is_drawn[self.image] &= self.value > 0
            return is_drawn

    monkeypatch.setattr(checking, "Kernel", Different)
    top, left, height, width, new_height, new_width = _PLANS[plan].tolist()[:6]
    what = f"444, quality 95, tiled, {[top, left, height, width]} to {[new_height, new_width]}"
    assert find_difference(compiled_functions()) == f"{what}: 1 of 29088 values differ by up to 1"
    if plan == 0:
        Different.value = 0
        assert find_difference(compiled_functions()) == f"{what}: not rendered"


def test_another_processor_or_version_of_a_library_needs_another_check(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [check_name("it"), check_name("other")]
    monkeypatch.setattr(simplejpeg, "__version__", "1.2.3")
    names.append(check_name.__wrapped__("it"))
    monkeypatch.setattr(PIL, "__version__", "1.2.3")
    names.append(check_name.__wrapped__("it"))
    monkeypatch.setattr("shardio.images.kernel.cache_files.describe_processor", lambda: "another one")
    names.append(check_name.__wrapped__("it"))
    assert len(set(names)) == len(names)
