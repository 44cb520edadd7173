"""Ranks for tests of frameworks: processes that call a function, with torchrun's variables and a gloo group.

``python -m tests.frameworks.launch MODULE:FUNCTION FOLDER WORLD_SIZES ARGUMENTS`` imports the module, and with it the
framework, once. The program then forks the ranks of each world in turn.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.spawn import start_processes

from shardio.check import CoverageRecorder, ExpectedSamples, make_report, merge_recordings
from tests.processes import run_python

ROOT = Path(__file__).parents[2]


def launch(target: str, folder: Path, *arguments: Any, world_sizes: Sequence[int] = (2,)) -> None:
    """Call ``MODULE:FUNCTION`` with ``folder/WORLD_SIZE`` and the arguments on each rank of each world."""
    texts = [json.dumps(world_sizes), json.dumps(arguments, default=str)]
    found = run_python("-m", "tests.frameworks.launch", target, folder, *texts, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


def returned(folder: Path, world_size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / str(world_size) / f"{rank}.json").read_text()) for rank in range(world_size)]


def be_rank(rank: int, target: str, folder: Path, world_size: int, arguments: list[Any]) -> None:
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_USE_CPU": "1"}
    rendezvous = f"file://{folder / 'rendezvous'}"  # Without a port.
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    module, function = target.split(":")
    result = getattr(sys.modules[module], function)(folder, *arguments)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def record_epochs(folder: Path, epochs: Sequence[Sequence[Sequence[Hashable]]]) -> None:
    """Record the keys of each batch that this rank receives, for each epoch."""
    with CoverageRecorder(folder) as recorder:
        for batches in epochs:
            assert len(list(recorder.watch(batches))) == len(batches)


def check_epochs(
    recordings: Path,
    keys: Sequence[Hashable],
    *,
    num_epochs: int = 2,
    world_size: int = 2,
    num_repeats: int | None = None,
) -> None:
    """Assert that the ranks of each recorded epoch received every sample once, plus the repeats that pad the epoch."""
    epochs = merge_recordings(sorted(recordings.glob("*.cov")))
    num_repeats = -len(keys) % world_size if num_repeats is None else num_repeats
    deliveries = [epoch.num_deliveries for epoch in epochs]
    assert deliveries == [len(keys) + num_repeats] * num_epochs, deliveries
    for epoch in epochs:
        make_report(epoch, ExpectedSamples.of_keys(keys, num_repeats=num_repeats)).raise_if_wrong()


if __name__ == "__main__":
    _, target, folder, world_sizes, arguments = sys.argv
    for module in (target.split(":")[0], "torch._dynamo"):  # Frameworks need torch._dynamo to prepare a model.
        importlib.import_module(module)
    gc.freeze()  # Frameworks often call gc.collect(), which would search everything that was imported.
    for world_size in json.loads(world_sizes):
        own = Path(folder, str(world_size))
        own.mkdir()
        start_processes(
            be_rank, args=(target, own, world_size, json.loads(arguments)), nprocs=world_size, start_method="fork"
        )
