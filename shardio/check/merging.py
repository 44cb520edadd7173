"""Merging: combine the recordings of a run's ranks into the coverage of each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from shardio.check.claims import RankEpoch
from shardio.check.coverage import Coverage, name_ranks
from shardio.check.recording_file import Recording, read_recording
from shardio.errors import FormatError

CLOCK_SLACK_S = 60.0
"""The tolerated difference between the clocks of two machines, in seconds."""


def merge_recordings(paths: Iterable[Path], *, world_size: int | None = None) -> list[Coverage]:
    """Return the coverage of each epoch from the recordings of all ranks.

    Args:
        paths: The recordings, one file per rank.
        world_size: The number of ranks; by default, the one in the recordings.

    Raises:
        FormatError: If a file is not a recording, a rank has none or several, or the recordings
            are from different runs.
    """
    recordings = [(read_recording(path), path) for path in paths]
    seen: dict[int, Path] = {}
    for recording, path in recordings:
        rank = recording.rank
        if rank in seen:
            raise FormatError(
                f"{path} and {seen[rank]} are both recordings of rank {rank}: pass one recording per rank, all from "
                "the same run"
            )
        seen[rank] = path
    return merge([recording for recording, _ in recordings], world_size=world_size)


def merge(recordings: Sequence[Recording], *, world_size: int | None = None) -> list[Coverage]:
    """Return the coverage of each epoch over all ranks.

    Raises:
        FormatError: If a rank is missing, or the recordings are from different runs.
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
            f"the recordings are from runs with {' and '.join(map(str, sizes))} ranks: pass the recordings of one run"
        )
    ranks = sorted(recording.rank for recording in recordings)
    expected = world_size or (sizes[0] if sizes else max(ranks, default=-1) + 1)
    missing = sorted(set(range(expected)) - set(ranks))
    if missing:
        raise FormatError(
            f"there is no recording of {name_ranks(missing)} of {expected}: pass the files of all ranks. A rank that "
            "ended early may have written none"
        )
    for one in recordings:
        for other in recordings:
            if one.process != other.process and one.written + CLOCK_SLACK_S < other.started:
                raise FormatError(
                    f"the recording of rank {one.rank} was last written before that of rank {other.rank} began: they "
                    "are from different runs. Delete the files of the earlier run and record all ranks again"
                )
