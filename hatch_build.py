"""Build hooks for hatchling.

The description of the package is the README without relative links. Wheels and editable installs get the kernel as
shared objects, one for each kind of processor (tools/build_kernel.py). If that fails, shardio is built without them.
Then the kernel is compiled on the machine where it is used, if numba is installed there.

    SHARDIO_KERNEL=require pip wheel .    fail if the kernel cannot be compiled
    SHARDIO_KERNEL=skip pip wheel .       do not compile it
"""

from __future__ import annotations

import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

MACHINES = ("x86_64", "aarch64")
GLIBC = "2_17"
"""The shared objects need nothing newer of the C library (memcpy 2.14, memset and log10 2.2.5)."""


class DescriptionHook(MetadataHookInterface):
    """Sets the dynamic field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the description into the metadata."""
        root = Path(self.root)
        make_index_page = runpy.run_path(str(root / "tools" / "index_page.py"))["make_index_page"]
        text = make_index_page((root / "README.md").read_text(encoding="utf-8"), self.config.get("source-url"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]  # It is generic only in newer versions.
    """Compiles the kernel into ``shardio/images/kernel/built/``."""

    def dependencies(self) -> list[str]:
        """Return the packages that the compilation needs."""
        if not is_wanted():
            return []
        find_compiler = runpy.run_path(str(Path(self.root) / "tools" / "build_kernel.py"))["find_compiler"]
        return ["numba>=0.61", "xxhash>=3.4", *([] if find_compiler() else ["ziglang>=0.13"])]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel, and describe the wheel accordingly."""
        if not is_wanted():
            return
        try:
            subprocess.run([sys.executable, "tools/build_kernel.py"], cwd=self.root, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if os.environ.get("SHARDIO_KERNEL") == "require":
                raise
            self.app.display_warning(f"shardio is built without its compiled kernel: {error}")
            return
        build_data["artifacts"] += ["shardio/images/kernel/built/*.so"]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC}_{platform.machine()}"


def is_wanted() -> bool:
    """Return whether to compile the kernel."""
    is_possible = platform.system() == "Linux" and platform.machine() in MACHINES
    return is_possible and os.environ.get("SHARDIO_KERNEL") != "skip"
