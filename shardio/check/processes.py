"""Real ranks: a script's loader, built in as many processes as torchrun would start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from shardio.check.coverage import Coverage
from shardio.check.recorder import merge_recordings, write_recording
from shardio.check.recording import record
from shardio.errors import ShardioError
from shardio.functions import load_function


def record_ranks(target: str, *, world_size: int, epochs: int, key: str | None) -> list[Coverage]:
    """Build a loader in ``world_size`` processes, iterate over it, and return the coverage of each epoch.

    Args:
        target: ``path/to/script.py:function``; the function is called without arguments and returns a loader.
        world_size: How many processes, with torchrun's environment variables.
        epochs: How many epochs; the loader, its sampler or its dataset is told which, if it has ``set_epoch``.
        key: Where a batch has its keys: a field's name, or its place as a number.

    Raises:
        ShardioError: If a process fails; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="shardio-check-") as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        processes = []
        for rank in range(world_size):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            environment = {**os.environ, **{name: str(value) for name, value in ranks.items()}}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            command = [sys.executable, "-m", "shardio.check.rank", target, directory, str(epochs), key or ""]
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        messages = [process.communicate()[1] for process in processes]
        for rank, (process, message) in enumerate(zip(processes, messages, strict=True)):
            if process.returncode:
                raise ShardioError(f"rank {rank} of {target} failed:\n{message.strip()}")
        return merge_recordings(sorted(Path(directory).glob("*.cov")))


def run_rank(target: str, directory: str, epochs: int, key: str | None) -> None:
    """Be one of the processes: build the loader, iterate over it, write the recording."""
    loader = load_function(target)()
    rank = int(os.environ["RANK"])
    found = []
    for epoch in range(epochs):
        _set_epoch(loader, epoch)
        coverage = Coverage()
        record(loader, coverage, rank=rank, key=int(key) if key and key.lstrip("-").isdigit() else key or None)
        found.append(coverage)
    write_recording(Path(directory) / f"rank-{rank:05d}.cov", rank, found)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader its epoch, or its sampler or dataset where these are told, as training scripts do."""
    for holder in (loader, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if callable(set_epoch := getattr(holder, "set_epoch", None)):
            set_epoch(epoch)
            return
