"""Forked ranks of torchrun's agent. torchrun itself starts Python for each rank, and importing torch takes seconds.

``python -m tests.torchrun NUM_RANKS MODULE:FUNCTION ARGUMENTS`` works like ``torchrun --standalone``, but calls a
function on each rank instead of running a script.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from tests.processes import run_python

ROOT = Path(__file__).parents[1]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "test"]


def run_by_torchrun(target: str, *arguments: Any, num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Call ``MODULE:FUNCTION`` with the arguments on each rank. Return the agent's exit status and all output."""
    return run_python("-m", "tests.torchrun", num_ranks, target, json.dumps(arguments, default=str), cwd=ROOT)


def be_rank(target: str, arguments: list[Any]) -> None:
    torch.set_num_threads(1)
    module, function = target.split(":")
    try:
        getattr(importlib.import_module(module), function)(*arguments)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # Exit as a failed script does, instead of raising an error, which the agent would report.


if __name__ == "__main__":
    _, num_ranks, target, texts = sys.argv
    importlib.import_module(target.split(":")[0])  # Import the module once for all ranks.
    gc.freeze()
    options = ["--nproc-per-node", num_ranks, *RENDEZVOUS, "--start-method", "fork", "no script"]
    elastic_launch(config_from_args(parse_args(options))[0], be_rank)(target, json.loads(texts))
