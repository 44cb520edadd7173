"""What people's code in worker processes depends on, besides what is sent to them."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """This process's settings when a fork server started, and the people's modules that it may have imported.

    Attributes:
        cwd: The working directory; None if it is gone.
        environment: The environment variables.
        module_path: ``sys.path``.
        modules: When each file of the user's modules was last modified, in ns.
    """

    cwd: str | None
    environment: Mapping[str, str]
    module_path: tuple[str, ...]
    modules: Mapping[str, int]

    @property
    def are_current(self) -> bool:
        """Whether a new process would find the same."""
        return self == find_surroundings(self.modules)


def find_surroundings(modules: Mapping[str, int] | None = None) -> Surroundings:
    """Return the surroundings of a process that starts now.

    Args:
        modules: The files to consider; by default, those of the modules that this process has imported, except
            Python's, shardio's and those of installed packages.
    """
    try:
        cwd = str(Path.cwd())
    except FileNotFoundError:
        cwd = None
    files = _find_files() if modules is None else modules
    return Surroundings(
        cwd=cwd,
        environment=dict(os.environ),
        module_path=tuple(map(str, sys.path)),
        modules={file: _read_time(file) for file in files},
    )


def _find_files() -> list[str]:
    own = str(Path(__file__).parents[2])
    installed = (sys.prefix, sys.base_prefix, own, *site.getsitepackages(), site.getusersitepackages())
    prefixes = tuple(each + os.sep for each in installed)
    # ``vars``, because attributes of modules that are loaded on demand would load them.
    modules: list[object] = list(sys.modules.values())  # Some are no modules.
    files = [vars(each).get("__file__") for each in modules if isinstance(each, ModuleType)]
    return [file for file in files if isinstance(file, str) and not file.startswith(prefixes)]


def _read_time(file: str) -> int:
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:  # It is gone, or inside an archive.
        return 0
