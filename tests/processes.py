"""Fresh processes, forked from a server that has imported torch: starting Python and importing torch are slow."""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, get_context, set_start_method
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __all__ lacks it
from torch.multiprocessing.spawn import start_processes

TIMEOUT_S = 300.0

IMPORTED = [
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",  # Every optimizer imports this module.
    "matplotlib.figure",
    "platformdirs",
    "pydantic.dataclasses",  # This reads manifests.
    "pydantic.type_adapter",
    "shardio.loader.data_loader",
    "shardio.cli.main",
    *(f"shardio.cli.{name}" for name in ("bench", "check", "dups", "info", "pack", "train", "verify", "view")),
    "shardio.packing.packer",
    "pytest",
]

IMPORTED_BY_WORKERS = ["torch.utils.data", "shardio.loader.data_loader"]
"""Modules for the fork server that a fresh process starts for its own workers."""


def forkserver_context(imported: Sequence[str] = IMPORTED) -> ForkServerContext:
    """Return a multiprocessing context whose processes have imported torch and shardio, and have run nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(imported))
    forkserver.ensure_running()
    return context


def assert_passes_in_fresh_process(function: Callable[..., object], *arguments: Any) -> None:
    """Assert that a function of a test module raises nothing in a fresh process."""
    process = forkserver_context().Process(target=_call, args=(os.environ.copy(), function, *arguments))
    process.start()
    assert _wait_for(process) == 0


def _call(environment: dict[str, str], function: Callable[..., object], *arguments: Any) -> None:
    _begin(environment)
    function(*arguments)


def run_ranks(function: Callable[..., object], *arguments: Any, num_ranks: int) -> None:
    """For each rank, call a function of a test module in a fresh process, with the rank and the arguments."""
    forkserver_context()
    arguments = (function, *arguments)
    start_processes(_call_frozen, args=arguments, nprocs=num_ranks, daemon=False, start_method="forkserver")


def _call_frozen(rank: int, function: Callable[..., object], *arguments: Any) -> None:
    gc.freeze()
    function(rank, *arguments)


def run_launched_ranks(function: Callable[..., object], *arguments: Any, num_ranks: int) -> None:
    """Call a function in a fresh process for each rank, with torchrun's environment variables and its store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(_call_as_rank, num_ranks, store.port, function, *arguments, num_ranks=num_ranks)


def _call_as_rank(rank: int, world_size: int, port: int, function: Callable[..., object], *arguments: Any) -> None:
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ |= {name: str(value) for name, value in {**ranks, **store, **agent}.items()}
    function(rank, *arguments)


def run_python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Call :func:`start_python`, and wait for the process. Return its exit status and output."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        status = _wait_for(start_python(*arguments, output=output, errors=errors, **options))
        command = list(map(str, arguments))
        return subprocess.CompletedProcess(command, status, output.read_text("utf-8"), errors.read_text("utf-8"))


def start_python(
    *arguments: object,
    cwd: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    prepare: Callable[[], object] | None = None,
    output: Path,
    errors: Path,
) -> ForkServerProcess:
    """Start a script, or a module after ``-m``, as ``python`` does without options, and append the output to files.

    The process calls ``prepare`` first.
    """
    command = list(map(str, arguments))
    environment = dict(os.environ if environment is None else environment)
    run = partial(_run_script, command, os.fspath(cwd or Path.cwd()), environment, prepare, output, errors)
    process = forkserver_context().Process(target=run)
    process.start()
    return process


def _wait_for(process: ForkServerProcess) -> int:
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


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
        atexit._run_exitfuncs()  # multiprocessing does not run these functions.


def _begin(environment: dict[str, str]) -> None:
    """Replace the server's environment, and reset the way in which it starts processes.

    Exclude the server's imports from garbage collection, which would visit and therefore copy them.
    """
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    set_start_method(None, force=True)
