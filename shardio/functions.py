"""Load functions that users name on the command line, such as their own loaders and models."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(target: str) -> Callable[..., Any]:
    """Load the function named by ``path/to/file.py:function`` or ``package.module:function``.

    As with ``python -m``, modules in the current directory are also found. A file may import modules from its own
    directory.

    Args:
        target: The file or module, and the name of a function or class in it.

    Raises:
        ValueError: If the target has another form, or the file, module or function does not exist.
    """
    path, _, name = target.rpartition(":")
    if path.endswith(".py"):
        module = _load_file(Path(path))
    elif all(part.isidentifier() for part in path.split(".")):
        module = _load_module(path)
    else:
        raise ValueError(
            f"{target!r} does not name a function: write path/to/file.py:function or package.module:function"
        )
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{path} has no function {name!r}")
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"the script {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Spawned worker processes look functions up by this name.
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # A console script's path starts with its own directory.
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If the named module exists and imports a missing one, the original error is better.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {error.name!r} in the current directory or in the Python environment"
        ) from error
