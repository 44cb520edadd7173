"""Fresh processes, forked from a server that has imported torch: starting Python and importing it takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from typing import Any

TIMEOUT_S = 120.0


def forkserver_context() -> ForkServerContext:
    """Return the context whose processes have imported torch and shardio, and have run nothing else."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.utils.data", "shardio.loader.data_loader", "pytest"])
    return context


def run_in_fresh_process(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of a test module in a process of its own; fail if it raises."""
    process = forkserver_context().Process(target=_call, args=(os.environ.copy(), function, arguments))
    process.start()
    process.join(TIMEOUT_S)
    process.kill()
    process.join()
    assert process.exitcode == 0


def _call(environment: dict[str, str], function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ.clear()  # The server's are those of the test that started it.
    os.environ.update(environment)
    function(*arguments)
