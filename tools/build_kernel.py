"""Compile the kernel into shared objects, one for each kind of processor: ``shardio/kernel/built/``.

    python tools/build_kernel.py                      for this machine
    python tools/build_kernel.py macosx_11_0_arm64    for a platform, by its tag in the names of wheels
    python tools/build_kernel.py --all                for all platforms

hatch_build.py runs this script when it builds shardio. The compiler is clang, from the package ziglang, for every
platform. Files that were already compiled from the same source are kept. Two builds with the same version of ziglang
produce identical bytes.
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


if __name__ == "__main__":
    main()
