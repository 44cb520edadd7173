"""The file of a recording: what one rank received in each epoch.

A recording is a safetensors file. For each epoch ``e``, it has the tensors ``ids.e`` (uint64 [n]),
``batches.e`` (uint32 [n]) and ``workers.e`` (int16 [n], -1 for an unknown worker). Its metadata
key ``recording`` is a JSON object with the format, the rank, the number of ranks, the process, the
times and, if they are few, the keys. For each epoch, the object also has the fields of RankEpoch
and of the loader's Allowance.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors
import safetensors.numpy

from shardio.check.allowance import Allowance
from shardio.check.claims import RankEpoch
from shardio.check.coverage import Coverage
from shardio.errors import FormatError
from shardio.json_text import parse_json
from shardio.whole_writes import write_whole

RECORDING_FORMAT = 2
COLUMNS = {"ids": "<u8", "batches": "<u4", "workers": "<i2"}
"""The columns of a recording and their types: 14 bytes per delivery."""

MAX_SAVED_NAMES = 20_000
"""The largest number of keys that a recording holds. With more, it holds only their hashes."""


@dataclass(slots=True, kw_only=True)
class Recording:
    """The deliveries that one rank received.

    Attributes:
        rank: The rank.
        world_size: The number of ranks; None if unknown.
        epochs: The coverage of each epoch.
        process: The machine and process that made the recording.
        started: When the recording began, in seconds since 1970.
        written: When the recording was last written, in seconds since 1970.
    """

    rank: int
    world_size: int | None
    epochs: list[Coverage] = field(default_factory=list)
    process: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    started: float = field(default_factory=time.time)
    written: float = field(default_factory=time.time)


def dump_recording(recording: Recording) -> bytes:
    """Return a recording as the bytes of its file."""
    tensors, names, epochs = {}, {}, []
    recording.written = time.time()
    for epoch, coverage in enumerate(recording.epochs):
        for (name, dtype), column in zip(COLUMNS.items(), coverage.arrays(), strict=True):
            tensors[f"{name}.{epoch}"] = column.astype(dtype)
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
    """Write a recording atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(path) as file:
        file.write(dump_recording(recording))


def read_recording(path: Path) -> Recording:
    """Read a recording from its file.

    Raises:
        FormatError: If the file cannot be read or is not a recording.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FormatError(f"the recording {path} cannot be read: {error}") from error
    return load_recording(content, str(path))


def load_recording(content: bytes, name: str) -> Recording:
    """Parse a recording from the bytes of its file.

    Args:
        content: The bytes of the file.
        name: The name of the recording, for messages.

    Raises:
        FormatError: If the content is not a recording.
    """
    try:
        tensors = safetensors.numpy.load(content)
        (length,) = struct.unpack("<Q", content[:8])
        header = parse_json(parse_json(content[8 : 8 + length])["__metadata__"]["recording"])
        if header["format"] != RECORDING_FORMAT:
            raise FormatError(
                f"{name} has format {header['format']}, but this version of shardio reads format {RECORDING_FORMAT}: "
                "record the run again"
            )
        rank, names = header["rank"], {int(identity, 16): text for identity, text in header["names"].items()}
        recording = Recording(
            rank=rank,
            world_size=header["world_size"],
            process=header["process"],
            started=header["started"],
            written=header["written"],
        )
        for number, epoch in enumerate(header["epochs"]):
            coverage = Coverage()
            coverage.add_arrays(rank, *(tensors[f"{column}.{number}"] for column in COLUMNS))
            coverage.names.update(names)
            if epoch["known"] is not None:
                coverage.rank_epochs[rank] = RankEpoch(**epoch["known"])
            if (allowance := epoch["allowance"]) is not None:
                samples = allowance.pop("samples")
                coverage.allowances[rank] = Allowance(samples=None if samples is None else tuple(samples), **allowance)
            recording.epochs.append(coverage)
    except (safetensors.SafetensorError, struct.error, TypeError, KeyError, ValueError) as error:
        raise FormatError(f"{name} is not a recording written by CoverageRecorder, or is damaged: {error}") from error
    return recording
