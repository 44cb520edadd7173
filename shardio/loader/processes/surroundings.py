"""What people's code in worker processes depends on, besides what is sent to them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PYTESTS_NOTE = "PYTEST_CURRENT_TEST"
"""The environment variable in which pytest notes the current test, on which code in workers rarely depends."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surroundings:
    """The settings and modules of this process at one moment.

    Attributes:
        cwd: The working directory; None if it is gone.
        environment: The environment variables, with pytest's note of the current test as an empty string: otherwise,
            each test of a suite would start a fork server of its own.
        module_path: ``sys.path``.
        specs: The spec of each imported module. A module that is reloaded gets a new one.
    """

    cwd: str | None
    environment: Mapping[str, str]
    module_path: tuple[str, ...]
    specs: Mapping[str, object]

    @property
    def are_current(self) -> bool:
        """Whether no setting has changed since, and no module was reloaded.

        Files of modules may have changed: this process still has the code that it imported.
        """
        now = find_surroundings()
        if (self.cwd, self.environment, self.module_path) != (now.cwd, now.environment, now.module_path):
            return False
        # Specs of the same file are equal, but not the same object.
        return all(now.specs.get(name, spec) is spec for name, spec in self.specs.items())


def find_surroundings() -> Surroundings:
    """Return the present surroundings."""
    try:
        cwd = str(Path.cwd())
    except FileNotFoundError:
        cwd = None
    modules: dict[str, object] = dict(sys.modules)  # Some values are not modules.
    return Surroundings(
        cwd=cwd,
        environment={name: "" if name == PYTESTS_NOTE else value for name, value in os.environ.items()},
        module_path=tuple(map(str, sys.path)),
        # ``vars``, because attributes of modules that are loaded on demand would load them.
        specs={name: vars(each).get("__spec__") for name, each in modules.items() if isinstance(each, ModuleType)},
    )
