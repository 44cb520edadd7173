"""Background processes: each calls one function of shardio, and finds modules where this process finds them."""

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
    """Start a Python process that calls a function without arguments and ends when it returns.

    The process reads nothing from standard input. It leads a session of its own, so Ctrl-C in the terminal reaches
    this process alone. It does not run the user's script.

    Args:
        function: ``package.module:function``.
        arguments: The process's ``sys.argv[1:]``, as strings.
        environment: Variables on top of this process's own.
        descriptors: The file descriptors that the process inherits.
        cwd: Its working directory; by default this process's.
        stdout: Its standard output, as in :class:`subprocess.Popen`.
        stderr: Its standard error; by default this process's.
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
    return f"import sys; sys.path[:] = eval(sys.argv.pop(1)); from {module} import {name}; {name}()"


def _absolute_module_path() -> list[str]:
    """Return where this process finds modules, without relative entries if the working directory is gone."""
    path = [*map(str, sys.path), str(Path(__file__).parents[1])]
    try:
        return list(map(os.path.abspath, path))
    except FileNotFoundError:
        return list(filter(os.path.isabs, path))
