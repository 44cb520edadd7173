from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardio.kernel.targets import CAPABILITIES, FOLDER, PLATFORMS, find_targets, name_cubin

ROOT = FOLDER.parents[1]


FIRST_BYTES = {
    "manylinux_2_17_x86_64": b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\x3e\0",  # ELF-64, a shared object, EM_X86_64.
    "manylinux_2_17_aarch64": b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\xb7\0",  # EM_AARCH64.
    "macosx_11_0_arm64": b"\xcf\xfa\xed\xfe\x0c\0\0\1",  # MH_MAGIC_64, CPU_TYPE_ARM64.
    "macosx_11_0_x86_64": b"\xcf\xfa\xed\xfe\7\0\0\1",  # CPU_TYPE_X86_64.
}


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """The empty folder for shared objects, in a copy of the files that the script needs."""
    shutil.copytree(FOLDER, tmp_path / "shardio" / "kernel", ignore=shutil.ignore_patterns("built"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=lambda _, names: {*names} - {"build_kernel.py"})
    (tmp_path / "shardio" / "kernel" / "built").mkdir()
    return tmp_path / "shardio" / "kernel" / "built"


def build(built: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, cwd=built.parents[2], env=environment, capture_output=True, text=True, timeout=600)


def test_what_was_compiled_from_the_same_source_stays_and_everything_else_is_removed(built: Path) -> None:
    present = {target.path.name for targets in PLATFORMS.values() for target in targets}
    present |= {name_cubin(each).name for each in CAPABILITIES}
    for name in (*present, "x86-64-v3-0123456789abcdef.so", "x.partial"):
        (built / name).write_text(name)
    for arguments in (["--all"], ["macosx_11_0_arm64"]):
        done = build(built, "tools/build_kernel.py", *arguments)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert {path.name: path.read_text() for path in built.iterdir()} == {name: name for name in present}


ON_ANOTHER_MACHINE = """
import platform, runpy
platform.machine = lambda: 's390x'
runpy.run_path('tools/build_kernel.py', run_name='__main__')
"""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["tools/build_kernel.py", "win_amd64"], r"'win_amd64' .choose from .?manylinux_2_17_x86_64.?, "),
        (["-c", ON_ANOTHER_MACHINE], r"^there is no kernel for \w+ on s390x$"),
    ],
    ids=["unknown", "not supported"],
)
def test_other_platforms_are_refused(built: Path, arguments: list[str], error: str) -> None:
    done = build(built, *arguments)
    assert done.returncode
    assert re.search(error, done.stderr, re.MULTILINE)
    assert not list(built.iterdir())


@pytest.mark.slow
def test_builds_are_reproducible(built: Path) -> None:
    done = build(built, "tools/build_kernel.py", ZIG_LOCAL_CACHE_DIR=str(built.parents[2] / "cache"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for target in find_targets():
        assert (built / target.path.name).read_bytes() == target.path.read_bytes()


@pytest.mark.slow
def test_each_platform_gets_code_of_its_format() -> None:
    # Compile in this checkout, where tools/wheel.sh may already have compiled everything.
    subprocess.run([sys.executable, "tools/build_kernel.py", "--all"], cwd=ROOT, check=True, timeout=600)
    contents = {path.name: path.read_bytes() for path in (FOLDER / "built").iterdir()}
    for platform, targets in PLATFORMS.items():
        for target in targets:
            content = contents.pop(target.path.name)
            assert content.startswith(FIRST_BYTES[platform])
            if platform.startswith("manylinux_2_17"):
                assert set(re.findall(rb"\0(\w+\.so\.\d+)\0", content)) == {b"libc.so.6"}
                versions = [tuple(map(int, version.split(b"."))) for version in re.findall(rb"GLIBC_([\d.]+)", content)]
                assert (2, 2) <= max(versions) <= (2, 17)
    for capability in CAPABILITIES:
        content = contents.pop(name_cubin(capability).name)
        assert content.startswith(b"\x7fELF\2\1")
        assert int.from_bytes(content[18:20], "little") == 190, "EM_CUDA"
        for stage in ("make_lookup", "find_weights", "decode_tile", "transform_block", "make_color", "render_pixel"):
            assert b"shardio_" + stage.encode() in content
    assert not contents
