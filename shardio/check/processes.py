"""Real ranks: run a script's loader in one process per rank, as torchrun does."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from shardio.check.coverage import Coverage
from shardio.check.exactly_once import needs_second_look
from shardio.check.launching import RankCommand, run_ranks
from shardio.check.merging import merge_recordings
from shardio.check.recording import record
from shardio.check.recording_file import Recording, write_recording
from shardio.check.report import ExpectedSamples
from shardio.epochs import set_epoch
from shardio.errors import IdentityError
from shardio.functions import load_function


def record_ranks(target: str, *, world_size: int, epochs: int, key: str | None) -> list[Coverage]:
    """Build a loader in ``world_size`` processes, read it, and return the coverage of each epoch.

    If samples are identified by content, one more epoch may be read for comparison.

    Args:
        target: ``path/to/script.py:function``. The function takes no arguments and returns a loader.
        world_size: The number of processes. They get torchrun's environment variables.
        epochs: The number of epochs. Each is set on the loader, or on its samplers and datasets.
        key: The name or index of the field that holds a batch's keys; None if there is none.

    Raises:
        ShardioError: If a process fails. The message names the first one that failed, and ends
            with its output.
    """
    with tempfile.TemporaryDirectory(prefix="shardio-check-") as directory:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        commands = []
        for rank in range(world_size):
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            name = _file_name(rank)
            commands.append(
                RankCommand(
                    command=[sys.executable, "-m", "shardio.check.rank", target, directory, str(epochs), key or ""],
                    environment={
                        **{variable: str(value) for variable, value in ranks.items()},
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                    },
                    errors=Path(directory) / f"{name}.err",
                    failed=Path(directory) / f"{name}.failed",
                )
            )
        run_ranks(commands, target)
        return merge_recordings(sorted(Path(directory).glob("*.cov")), world_size=world_size)


def run_rank(target: str, directory: str, epochs: int, key: str | None) -> None:
    """Build the loader, read it, and write the recording of this process's rank."""
    loader = load_function(target)()
    if not isinstance(loader, Iterable):
        raise IdentityError(
            f"{target} must return a loader or another iterable of batches, got {type(loader).__name__}"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    recording = Recording(rank=rank, world_size=world_size)
    while len(recording.epochs) < epochs or (
        len(recording.epochs) == epochs == 1 and needs_second_look(recording.epochs, ExpectedSamples())
    ):
        set_epoch(loader, len(recording.epochs))
        coverage = Coverage()
        field = int(key) if key and key.lstrip("-").isdigit() else key or None
        record(loader, coverage, rank=rank, key=field, world_size=world_size)
        recording.epochs.append(coverage)
    write_recording(Path(directory) / f"{_file_name(rank)}.cov", recording)


def record_failure(directory: str, time_ns: int) -> None:
    """Record when this process failed, so that the launcher can name the first failure."""
    (Path(directory) / f"{_file_name(int(os.environ['RANK']))}.failed").write_text(str(time_ns))


def _file_name(rank: int) -> str:
    return f"rank-{rank:05d}"
