"""CoverageRecorder: notes, from inside a training run, which samples a rank received; one small file a rank.

A recording is a safetensors file with, for each epoch ``e``, the tensors ``ids.e`` (uint64 [n]), ``batches.e`` (uint32
[n]) and ``workers.e`` (int16 [n], -1 for an unknown worker), and one metadata key, ``recording``, with a JSON object:
its format, the rank and the number of ranks, when and by which process it was written, the keys' names where they are
few, and for each epoch what is known beside the deliveries, and what the loader's remainder policy asks for.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors.numpy

from shardio.check.coverage import Coverage
from shardio.check.identity import Key
from shardio.check.recording import observe
from shardio.world import find_world

RECORDING_FORMAT = 2
COLUMNS = {"ids": "<u8", "batches": "<u4", "workers": "<i2"}
"""What a recording says of each delivery: 14 bytes."""

MAX_SAVED_NAMES = 20_000
"""Keys that a recording names; in a larger one, strings are known by their hash."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """What one rank received.

    Attributes:
        rank: Which of the ranks it is.
        world_size: How many there are; None where that is not known.
        epochs: What it received in each epoch.
        process: The machine and the process that recorded it.
        started: When the recording began, in seconds since the epoch.
        written: When it was last written.
    """

    rank: int
    world_size: int | None
    epochs: list[Coverage] = field(default_factory=list)
    process: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    started: float = field(default_factory=time.time)
    written: float = field(default_factory=time.time)


class CoverageRecorder:
    """Write down which samples this rank receives. A context manager; the file is written after each epoch.

    >>> with CoverageRecorder("run", key=2) as recorder:  # doctest: +SKIP
    ...     for epoch in range(10):
    ...         for images, labels, keys in recorder.watch(loader): ...

    ``shardio check --merge run/*.cov`` judges the recordings of all ranks.

    Args:
        directory: Where the file ``rank-00000.cov`` goes; made if it is not there. A former run's file is replaced at
            once.
        key: Where a batch has its keys, as for :func:`shardio.check.assert_exactly_once`.
        rank: This process; by default torch.distributed's or torchrun's rank.
        world_size: How many processes there are, likewise.
    """

    def __init__(
        self, directory: str | Path, *, key: Key = None, rank: int | None = None, world_size: int | None = None
    ) -> None:
        world = find_world()
        if rank is None:
            rank, world_size = world.rank, world.world_size if world_size is None else world_size
        self.recording = Recording(rank=rank, world_size=world_size)
        self.path = Path(directory) / f"rank-{rank:05d}.cov"
        self._key = key
        self.close()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.recording.rank

    @property
    def epochs(self) -> list[Coverage]:
        """What was received in each epoch."""
        return self.recording.epochs

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Pass on the batches of one epoch and note their samples.

        Raises:
            IdentityError: If a key is none, or it cannot be seen where samples lie in a batch.
        """
        coverage = Coverage()
        self.epochs.append(coverage)
        world_size = self.recording.world_size or self.rank + 1
        try:
            yield from observe(loader, coverage, rank=self.rank, key=self._key, world_size=world_size)
        finally:
            if self.rank in coverage.rank_epochs:
                coverage.rank_epochs[self.rank].may_be_fewer = True  # A resumed epoch has the rest of one.
            self.close()

    def gather(self) -> list[Coverage]:
        """Return the coverage of each epoch over all ranks, by torch.distributed; each rank must call it.

        Raises:
            FormatError: If ranks recorded different numbers of epochs.
        """
        import torch.distributed

        from shardio.check.merging import load_recording, merge

        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, dump_recording(self.recording))
        return merge([load_recording(part, f"rank {rank}") for rank, part in enumerate(parts)], world_size=len(parts))

    def close(self) -> None:
        """Write what was noted so far."""
        write_recording(self.path, self.recording)

    def __enter__(self) -> CoverageRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def dump_recording(recording: Recording) -> bytes:
    """Return a recording as the content of its file."""
    tensors, names, epochs = {}, {}, []
    recording.written = time.time()
    for number, coverage in enumerate(recording.epochs):
        for (name, dtype), column in zip(COLUMNS.items(), coverage.arrays(), strict=True):
            tensors[f"{name}.{number}"] = column.astype(dtype)
        names.update(coverage.names)
        known, allowance = coverage.rank_epochs.get(recording.rank), coverage.allowance
        epochs.append(
            {
                "known": None if known is None else asdict(known),
                "allowance": None if allowance is None else asdict(allowance),
            }
        )
    shown = {f"{identity:016x}": str(name) for identity, name in names.items()} if len(names) <= MAX_SAVED_NAMES else {}
    header = {
        "format": RECORDING_FORMAT,
        "rank": recording.rank,
        "world_size": recording.world_size,
        "process": recording.process,
        "started": recording.started,
        "written": recording.written,
        "epochs": epochs,
        "names": shown,
    }
    return safetensors.numpy.save(tensors, {"recording": json.dumps(header)})


def write_recording(path: Path, recording: Recording) -> None:
    """Write what a rank received; the file is there whole or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(dump_recording(recording))
    partial.replace(path)
