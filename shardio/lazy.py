"""Packages whose public names are imported on first use, so that a process imports only what it uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_on_use(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports a public name when it is first used.

    Args:
        package: The package's ``__name__``.
        names: For each module, as :func:`importlib.import_module` takes it, the public names that the package takes
            from it, separated by spaces. None of them may be the name of a module of the package, which would hide it.
    """
    homes = {name: module for module, of_module in names.items() for name in of_module.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(homes[name], package), name)
        setattr(sys.modules[package], name, found)  # Python does not call this function for the name again.
        return found

    return get
