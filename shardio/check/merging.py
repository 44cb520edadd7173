"""Merging: the recordings of all ranks of one run, as the coverage of each epoch."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

import safetensors
import safetensors.numpy

from shardio.check.allowance import Allowance
from shardio.check.claims import RankEpoch
from shardio.check.coverage import Coverage
from shardio.check.recorder import COLUMNS, RECORDING_FORMAT, Recording
from shardio.errors import FormatError

CLOCK_SLACK_S = 60.0
"""By how much the clocks of two machines may differ."""


def merge_recordings(paths: Iterable[Path], *, world_size: int | None = None) -> list[Coverage]:
    """Return the coverage of each epoch over the recordings of all ranks.

    Args:
        paths: The files.
        world_size: How many ranks there are; by default as many as the recordings say.

    Raises:
        FormatError: If a file is not a recording, a rank has none or two, or they are not of one run.
    """
    recordings = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FormatError(f"{path} is not a recording of CoverageRecorder: {error}") from error
        recordings.append((load_recording(content, str(path)), path))
    seen: dict[int, Path] = {}
    for recording, path in recordings:
        rank = recording.rank
        if rank in seen:
            raise FormatError(f"{path} and {seen[rank]} are both recordings of rank {rank}: merge those of one run")
        seen[rank] = path
    return merge([recording for recording, _ in recordings], world_size=world_size)


def load_recording(content: bytes, name: str) -> Recording:
    """Return what the content of a recording's file holds.

    Raises:
        FormatError: If it is no recording; ``name`` says which in the message.
    """
    try:
        tensors = safetensors.numpy.load(content)
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["recording"])
        if header["format"] != RECORDING_FORMAT:
            raise FormatError(
                f"{name} has the format {header['format']}, and this shardio reads {RECORDING_FORMAT}: record the run "
                f"again"
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
        raise FormatError(f"{name} is not a recording of CoverageRecorder: {error}") from error
    return recording


def merge(recordings: Sequence[Recording], *, world_size: int | None = None) -> list[Coverage]:
    """Return the coverage of each epoch over all ranks.

    Raises:
        FormatError: If a rank is missing, or the recordings are not of one run.
    """
    _check_ranks(recordings, world_size)
    merged = []
    for number in range(max((len(recording.epochs) for recording in recordings), default=0)):
        whole = Coverage()
        for recording in recordings:
            if number >= len(recording.epochs):
                whole.rank_epochs[recording.rank] = RankEpoch(is_whole=False)
                continue
            part = recording.epochs[number]
            whole.add_arrays(recording.rank, *part.arrays())
            whole.names.update(part.names)
            whole.rank_epochs |= part.rank_epochs
            whole.allowances |= part.allowances
        merged.append(whole)
    return merged


def _check_ranks(recordings: Sequence[Recording], world_size: int | None) -> None:
    sizes = sorted({recording.world_size for recording in recordings if recording.world_size is not None})
    if len(sizes) > 1:
        raise FormatError(
            f"the recordings are of runs with {' and '.join(map(str, sizes))} ranks: merge those of one run"
        )
    ranks = sorted(recording.rank for recording in recordings)
    expected = world_size or (sizes[0] if sizes else max(ranks, default=-1) + 1)
    missing = sorted(set(range(expected)) - set(ranks))
    if missing:
        raise FormatError(
            f"rank {', '.join(map(str, missing))} of {expected} has no recording: merge the files of all ranks; a "
            f"rank that "
            "ended early leaves none"
        )
    for one in recordings:
        for other in recordings:
            if one.process != other.process and one.written + CLOCK_SLACK_S < other.started:
                raise FormatError(
                    f"the recording of rank {one.rank} was written before that of rank {other.rank} began: they are of "
                    "different runs. Remove what a former run left, and record again"
                )
