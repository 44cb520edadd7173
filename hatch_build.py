"""Build hooks for hatchling.

The description of the package is the README without relative links. Wheels and editable installs get the compiled
kernel (tools/build_kernel.py).

    pip wheel .                                        a wheel for this machine
    SHARDIO_PLATFORM=macosx_11_0_arm64 pip wheel .     a wheel for another platform, by its tag

If there is no kernel for the platform, the wheel is for any platform, and Pillow and libjpeg-turbo do the work.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

CUDA_COMPILER = ["cuda-bindings>=12.9,<13", "cuda-core>=1.0", "nvidia-cuda-nvrtc-cu12>=12.9"]
"""The packages that compile the stages of CUDA devices (shardio/kernel/stages.cu). This needs no device."""


def _read_targets(root: Path) -> dict[str, Any]:
    return runpy.run_path(str(root / "shardio" / "kernel" / "targets.py"))


def _choose_platform(root: Path) -> str | None:
    return os.environ.get("SHARDIO_PLATFORM") or _read_targets(root)["find_platform"]()


class DescriptionHook(MetadataHookInterface):
    """Sets the dynamic field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write the description into the metadata."""
        root = Path(self.root)
        make_index_page = runpy.run_path(str(root / "tools" / "index_page.py"))["make_index_page"]
        text = make_index_page((root / "README.md").read_text(encoding="utf-8"), self.config.get("source-url"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]  # Generic only in newer versions of hatchling.
    """Compiles the kernel into ``shardio/kernel/built/``."""

    def dependencies(self) -> list[str]:
        """Return the compiler of the stages of CUDA devices, which only wheels for Linux contain."""
        name = _choose_platform(Path(self.root))
        return CUDA_COMPILER if name is not None and "linux" in name else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the kernel, and describe the wheel accordingly."""
        root = Path(self.root)
        if (name := _choose_platform(root)) is None:
            return
        kernel = _read_targets(root)
        subprocess.run([sys.executable, "tools/build_kernel.py", name], cwd=root, check=True)
        built = [target.path for target in kernel["PLATFORMS"][name]]
        if "linux" in name:  # tools/build_kernel.py compiles these files if their compiler is installed.
            built += [path for path in map(kernel["name_cubin"], kernel["CAPABILITIES"]) if path.exists()]
        build_data["artifacts"] += [str(path.relative_to(root)) for path in built]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{name}"
