"""Compile the kernel into shared objects, one for each kind of processor: ``shardio/images/kernel/built/``.

    python tools/build_kernel.py    compile it, unless it is already compiled from the same source

hatch_build.py runs this script when it builds shardio. The script needs numba, xxhash and a linker: the C compiler
named by CC, the system's compiler, or that of the package ziglang. Two builds with the same versions of these produce
identical bytes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]

KEPT = (".so", ".o")
"""The suffixes of the files to keep. The tests load the object files with LLVM, as on machines without shared objects.
"""


def find_compiler() -> list[str]:
    """Return the command of a C compiler, which is used only to link; an empty list if there is none."""
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if (path := shutil.which(name)) is not None:
            return [path]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else []


def build_kernel() -> None:
    """Compile the functions for each target, unless they are already compiled from the same source."""
    import_without_dependencies("shardio.images", "shardio.images.jpeg", "shardio.images.kernel")
    from shardio.images.kernel.source import BUILT_FOLDER, built_path
    from shardio.images.kernel.targets import TARGETS

    paths = {target: built_path(target) for target in TARGETS[platform.machine()]}
    if not all(path.exists() for path in paths.values()):
        if not find_compiler():
            sys.exit("nothing can link the kernel: install a C compiler, name one with CC, or run pip install ziglang")
        from shardio.images.kernel.compiling import compile_functions, emit_object

        print("compiling the kernel, which takes about half a minute", flush=True)
        BUILT_FOLDER.mkdir(exist_ok=True)
        code = compile_functions()
        for target, path in paths.items():
            link(emit_object(code, "generic" if target == "aarch64" else target), path)
    for path in set(BUILT_FOLDER.iterdir()) - {path.with_suffix(suffix) for path in paths.values() for suffix in KEPT}:
        path.unlink()


def link(content: bytes, path: Path) -> None:
    """Link an object file into a shared object, which is written atomically."""
    unlinked, unfinished = path.with_suffix(".o"), path.with_suffix(".partial")
    unlinked.write_bytes(content)
    options = ["-shared", "-nostartfiles", "-s", "-Wl,--build-id=none", "-Wl,-z,noexecstack"]
    names = ["-o", unfinished.name, unlinked.name, "-lm"]
    subprocess.run([*find_compiler(), *options, *names], cwd=path.parent, check=True)
    unfinished.replace(path)


def import_without_dependencies(*packages: str) -> None:
    """Make the modules of packages importable without running the packages' own imports, which may fail."""
    sys.path.insert(0, str(ROOT))
    for name in packages:
        package = ModuleType(name)
        package.__path__ = [str(ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package


if __name__ == "__main__":
    # The code must not depend on the processor that compiles it. numba reads these variables when it is imported.
    os.environ["NUMBA_CPU_NAME"] = "x86-64-v3" if platform.machine() == "x86_64" else "generic"
    os.environ["NUMBA_CPU_FEATURES"] = ""
    build_kernel()
