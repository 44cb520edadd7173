"""Compile the kernel into shared objects, one for each kind of processor: ``shardio/kernel/built/``.

    python tools/build_kernel.py                      for this machine
    python tools/build_kernel.py macosx_11_0_arm64    for a platform, by its tag in wheel names
    python tools/build_kernel.py --all                for all platforms

hatch_build.py runs this script when it builds shardio. The compiler is clang, from the package ziglang, for every
platform. Files that were already compiled from the same source are kept. Two builds with the same version of ziglang
produce identical bytes.

If the packages cuda-core and nvidia-cuda-nvrtc-cu12 are installed, the stages for CUDA devices are also compiled, for
the Linux platforms. Compiling the stages needs no device.
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
OPTIONS = (
    "-std=gnu11",
    "-O3",
    "-g0",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fwrapv",  # Integers that overflow wrap around; the code checks for overflow where necessary.
    "-ffp-contract=off",  # Floating-point numbers are rounded as in the libraries, so pixels are equal.
    "-fno-math-errno",
    "-fno-sanitize=all",
    "-Wall",
    "-Wextra",
    "-Werror",
)


def build(target: Any, sources: list[Path]) -> None:
    """Compile the kernel for a target. No other process sees an incomplete file."""
    unfinished = target.path.with_suffix(f".{os.getpid()}")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target.triple, f"-mcpu={target.processor}", *OPTIONS]
    subprocess.run([*command, "-s", "-o", str(unfinished), *map(str, sources), "-lm"], cwd=ROOT, check=True)
    unfinished.replace(target.path)


_STANDARD_HEADERS = {
    "stdbool.h": "",
    "stddef.h": "",
    "stdint.h": """
        typedef signed char int8_t;
        typedef unsigned char uint8_t;
        typedef short int16_t;
        typedef unsigned short uint16_t;
        typedef int int32_t;
        typedef unsigned int uint32_t;
        typedef long long int64_t;
        typedef unsigned long long uint64_t;
    """,
}
"""The standard headers that the stages include, because NVRTC has none."""


def build_stages(capability: tuple[int, int], path: Path) -> None:
    """Compile the stages for CUDA devices of a compute capability. No other process sees an incomplete file."""
    from cuda.core import Program, ProgramOptions

    source = ROOT / "shardio" / "kernel"
    with TemporaryDirectory() as headers:
        for name, text in _STANDARD_HEADERS.items():
            (Path(headers) / name).write_text(text)
        options = ProgramOptions(
            arch="sm_{}{}".format(*capability),
            std="c++20",
            device_as_default_execution_space=True,
            fma=False,  # Round floating-point results as CPUs do.
            include_path=[headers, str(source)],
        )
        compiled = Program((source / "stages.cu").read_text(), "c++", options).compile("cubin")
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(compiled.code)
    unfinished.replace(path)


def can_build_stages() -> bool:
    """Return whether the compiler for the stages is installed. Code from NVRTC 13 would need newer drivers."""
    try:
        import cuda.core  # noqa: F401
        from cuda.bindings import nvrtc
    except ImportError:
        return False
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError:  # The NVRTC library is missing.
        return False
    return bool(major == 12 and minor >= 9)


def main() -> None:
    """Run the command."""
    kernel = runpy.run_path(str(ROOT / "shardio" / "kernel" / "targets.py"))  # Needs no requirements.
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("platform", nargs="?", choices=list(kernel["PLATFORMS"]), help="the platform's tag")
    parser.add_argument("--all", action="store_true", help="compile the kernel for all platforms")
    arguments = parser.parse_args()
    name = arguments.platform or kernel["find_platform"]()
    if name is None:
        sys.exit(f"there is no kernel for {platform.system()} on {platform.machine()}")
    names = kernel["PLATFORMS"] if arguments.all else [name]
    targets = [target for each in names for target in kernel["PLATFORMS"][each]]
    targets[0].path.parent.mkdir(exist_ok=True)
    for path in targets[0].path.parent.iterdir():
        if kernel["hash_source"]() not in path.name:
            path.unlink()
    sources = [path for path in kernel["list_source"]() if path.suffix == ".c"]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda target: build(target, sources), [each for each in targets if not each.path.exists()]))
    if any("linux" in each for each in names) and can_build_stages():
        for capability in kernel["CAPABILITIES"]:
            path = kernel["name_cubin"](capability)
            if not path.exists():
                build_stages(capability, path)


if __name__ == "__main__":
    main()
