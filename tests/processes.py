"""Fresh processes, forked from a server that has imported torch: starting Python and importing it takes seconds."""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import forkserver, get_context, set_start_method
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any

from torch.multiprocessing.spawn import start_processes

TIMEOUT_S = 300.0

IMPORTED = [
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",  # Every optimiser imports it.
    "matplotlib.figure",
    "shardio.loader.data_loader",
    "shardio.cli.main",
    "pytest",
]
"""What the processes have imported when they begin."""


def forkserver_context() -> ForkServerContext:
    """Return the context whose processes have imported torch and shardio, and have run nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    forkserver.ensure_running()
    return context


def assert_passes_in_fresh_process(function: Callable[..., object], *arguments: Any) -> None:
    """Assert that a function of a test module raises nothing in a fresh process."""
    assert _run(partial(_call, os.environ.copy(), function, arguments)) == 0


def run_ranks(function: Callable[..., object], *arguments: Any, num_ranks: int) -> None:
    """Call a function of a test module with the rank and the arguments in a fresh process for each rank."""
    forkserver_context()
    start_processes(function, args=arguments, nprocs=num_ranks, daemon=False, start_method="forkserver")


def run_python(
    *arguments: object,
    cwd: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or a module after ``-m``, as ``python`` does; return its exit status and its output.

    Python's own options are missing. Call ``prepare`` first, in the process of the script.
    """
    command = list(map(str, arguments))
    environment = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        status = _run(partial(_run_script, command, os.fspath(cwd or Path.cwd()), environment, prepare, output, errors))
        return subprocess.CompletedProcess(command, status, output.read_text("utf-8"), errors.read_text("utf-8"))


def _run(work: Callable[[], object]) -> int:
    """Let a fresh process work; return its exit status."""
    process = forkserver_context().Process(target=work)
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _call(environment: dict[str, str], function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    _begin(environment)
    function(*arguments)


def _run_script(
    command: list[str],
    cwd: str,
    environment: dict[str, str],
    prepare: Callable[[], object] | None,
    output: Path,
    errors: Path,
) -> None:
    for path, descriptor in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(cwd)
    _begin(environment)
    if prepare is not None:
        prepare()
    main = ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    try:
        if command[0] == "-m":
            sys.path.insert(0, cwd)
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))  # noqa: PTH100, PTH120  # as Python does
            sys.argv = command
            main.__file__ = command[0]
            exec(compile(Path(command[0]).read_bytes(), command[0], "exec"), vars(main))
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out.


def _begin(environment: dict[str, str]) -> None:
    """Forget what is the server's: the environment of the test that started it, and how it starts processes."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    set_start_method(None, force=True)
