"""Functions that people name on the command line: their own loaders and models."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(target: str) -> Callable[..., Any]:
    """Return what ``path/to/file.py:function`` or ``package.module:function`` names.

    Modules are found as by ``python -m``: in the current directory, too. What a file imports may lie beside it.

    Args:
        target: The file or module, and the name of something in it that can be called: a class will do.

    Raises:
        ValueError: If the target is not of that form, there is no such file or module, or no such function in it.
    """
    path, _, name = target.rpartition(":")
    if path.endswith(".py"):
        module = _load_file(Path(path))
    elif all(part.isidentifier() for part in path.split(".")):
        module = _load_module(path)
    else:
        raise ValueError(f"{target!r} names no function: write path/to/file.py:function or package.module:function")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"there is no script {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Worker processes that are not forked look their functions up by it.
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # A console script's own path begins with where it is installed.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # What is missing may also be a module that the named one imports: that error says it better.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name!r} in the current directory or installed") from error
