"""Background processes. Each calls one function of shardio and has this process's module search path."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO


def start_process(
    function: str,
    arguments: Sequence[object] = (),
    *,
    environment: Mapping[str, str] | None = None,
    descriptors: Sequence[int] = (),
    cwd: str | None = None,
    stdout: int | IO[bytes] | None = subprocess.DEVNULL,
    stderr: int | IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python process that calls a function without arguments and ends when the function returns.

    The new process has an empty standard input and its own session, so Ctrl-C in the terminal does not reach it. It
    does not run the user's script.

    Args:
        function: ``package.module:function``.
        arguments: The new process's ``sys.argv[1:]``, converted to strings.
        environment: Environment variables to add to those of this process.
        descriptors: The file descriptors that the new process inherits.
        cwd: Its working directory; by default, that of this process.
        stdout: Its standard output, as in :class:`subprocess.Popen`.
        stderr: Its standard error; by default, that of this process.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _write_program(function), repr(_absolute_module_path()), *map(str, arguments)],
        env={**os.environ, **(environment or {})},
        pass_fds=descriptors,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def _write_program(function: str) -> str:
    module, _, name = function.partition(":")
    # Imports leave few cycles behind, and looking for them takes a tenth of their time.
    return (
        "import gc, sys; gc.disable(); sys.path[:] = eval(sys.argv.pop(1)); "
        f"from {module} import {name}; gc.enable(); {name}()"
    )


def _absolute_module_path() -> list[str]:
    """Return this process's module search path, without relative entries if the working directory is gone."""
    path = [*map(str, sys.path), str(Path(__file__).parents[1])]
    try:
        return list(map(os.path.abspath, path))
    except FileNotFoundError:
        return list(filter(os.path.isabs, path))
