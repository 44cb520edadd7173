"""Record the samples that each rank receives in a training run, and combine the recordings of all ranks.

A recording is a safetensors file. For each epoch ``e``, it has the tensors ``ids.e`` (uint64 [n]), ``batches.e``
(uint32 [n]) and ``workers.e`` (int16 [n], -1 for an unknown worker). Its metadata key ``recording`` is a JSON object
with the format, the rank, the number of ranks, the process, the times and, if they are few, the keys. For each epoch,
the object also has the fields of RankEpoch and of the loader's Allowance.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.numpy

from shardio.check.coverage import Allowance, Coverage, RankEpoch, name_ranks, resumes, source_of
from shardio.check.identity import Key
from shardio.check.recording import observe
from shardio.errors import FormatError
from shardio.files import remove_unfinished, write_whole
from shardio.values import parse_json
from shardio.world import choose_world, find_data_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


RECORDING_FORMAT = 2
"""The version of the file format."""

COLUMNS = {"ids": "<u8", "batches": "<u4", "workers": "<i2"}
"""The columns of a recording and their types: 14 bytes per delivery."""

MAX_SAVED_NAMES = 20_000
"""The largest number of keys that a recording holds. With more keys, it holds only hashes."""

CLOCK_SLACK_S = 60.0
"""The tolerated difference between the clocks of two machines, in seconds."""


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


class CoverageRecorder:
    """A context manager that records which samples this rank receives.

    It writes its file after each epoch.

    >>> with CoverageRecorder("run", key=2) as recorder:  # doctest: +SKIP
    ...     for epoch in range(10):
    ...         for images, labels, keys in recorder.watch(loader): ...

    ``shardio check --merge run/*.cov`` checks the recordings of all ranks.

    Args:
        directory: The directory for each rank's file, such as ``rank-00000.cov``. It is created if it is missing. The
            file of an earlier run is renamed, for example to ``rank-00000.cov.old``.
        key: The way to find a batch's keys, as in :func:`shardio.check.assert_exactly_once`.
        rank: The rank of this process; by default, from torch.distributed or torchrun.
        world_size: The number of ranks; by default, that of torch.distributed or torchrun, or unknown if ``rank`` is
            given.
        mesh: An alternative to ``rank`` and ``world_size``, as for the dataset. Groups along the mesh without rank
            0 write files such as ``rank-00000.group-00001.replica``, named after the first rank of the group.
        group: Another alternative: a process group, as for the dataset.
        resume: The result of :meth:`state_dict` in the checkpoint that training resumes from. The recording in the
            file continues from there, without its later entries.

    Raises:
        FormatError: If the file to resume is missing, ends before the checkpoint, or was recorded with a different
            number of ranks.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        key: Key = None,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        group: ProcessGroup | None = None,
        resume: Mapping[str, int] | None = None,
    ) -> None:
        if mesh is not None or group is not None:
            world = choose_world(rank, world_size, mesh=mesh, group=group)
            assert world is not None, "the user chose one"
            rank, world_size = world.rank, world.world_size
        elif rank is None:
            world = find_data_world()
            rank, world_size = world.rank, world.world_size if world_size is None else world_size
        self._group = group if mesh is None else mesh.get_group()
        self.recording = Recording(rank=rank, world_size=world_size)
        self.path = Path(directory) / f"rank-{rank:05d}{_find_suffix(self._group)}"
        self._key = key
        self._is_resumed = resume is not None
        if resume is not None:
            self._continue(resume)
        elif self.path.exists():
            self.path.replace(f"{self.path}.old")
        if self.path.parent.is_dir():
            remove_unfinished(self.path.parent, (self.path.name,))
        self.close()

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.recording.rank

    @property
    def epochs(self) -> list[Coverage]:
        """The coverage of each epoch on this rank."""
        return self.recording.epochs

    def watch(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of one epoch and record their samples.

        Raises:
            IdentityError: If a key does not identify a sample, or a batch cannot be split into samples.
        """
        coverage = self._start_epoch(loader)
        world_size = self.recording.world_size or self.rank + 1
        try:
            yield from observe(loader, coverage, rank=self.rank, key=self._key, world_size=world_size)
        finally:
            if self.rank in coverage.rank_epochs:
                coverage.rank_epochs[self.rank].may_be_fewer = True  # A resumed epoch delivers only the rest.
            self.close()

    def gather(self) -> list[Coverage]:
        """Gather the coverage of each epoch from all ranks that read different samples. Every rank must call this.

        Raises:
            FormatError: If the recordings are from different runs.
        """
        import torch.distributed

        parts: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(parts, dump_recording(self.recording), group=self._group)
        return merge([load_recording(part, f"rank {rank}") for rank, part in enumerate(parts)], world_size=len(parts))

    def state_dict(self) -> dict[str, int]:
        """Write the recording to its file, and return the numbers of epochs and of batches in the last epoch.

        Save the result in each checkpoint, together with the loader's state.
        """
        self.close()
        known = self.epochs[-1].rank_epochs.get(self.rank) if self.epochs else None
        return {"num_epochs": len(self.epochs), "num_batches": 0 if known is None else known.num_batches}

    def _continue(self, state: Mapping[str, int]) -> None:
        """Load the earlier run's recording up to its checkpoint."""
        former = read_recording(self.path)
        if former.world_size != self.recording.world_size:
            raise FormatError(
                f"{self.path} was recorded with a world size of {former.world_size}, but training resumes with "
                f"{self.recording.world_size}: record the rest of the run in another directory"
            )
        num_epochs, num_batches = state["num_epochs"], state["num_batches"]
        epochs = former.epochs[:num_epochs]
        last = epochs[-1].rank_epochs.get(self.rank) if epochs else None
        if len(epochs) < num_epochs or (last is not None and last.num_batches < num_batches):
            raise FormatError(
                f"{self.path} ends before batch {num_batches} of epoch {num_epochs - 1}, where the checkpoint was "
                "written: it is from another run. Use the file of the run that wrote the checkpoint"
            )
        self.recording.started = former.started
        self.epochs.extend(epochs)
        if last is not None and (last.num_batches > num_batches or not last.is_whole):
            self.epochs[-1] = self.epochs[-1].until(self.rank, num_batches)

    def _start_epoch(self, loader: Iterable[Any]) -> Coverage:
        """Return the coverage to add to: a new one, or the coverage of a resumed epoch."""
        last = self.epochs[-1].rank_epochs.get(self.rank) if self._is_resumed and self.epochs else None
        self._is_resumed = False
        if last is not None and not last.is_whole:
            is_resumed = resumes(source_of(loader), last.num_batches)
            if is_resumed:
                return self.epochs[-1]
            last.is_whole = is_resumed is None
        self.epochs.append(Coverage())
        return self.epochs[-1]

    def close(self) -> None:
        """Write the recording to its file."""
        write_recording(self.path, self.recording)

    def __enter__(self) -> CoverageRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _find_suffix(group: ProcessGroup | None) -> str:
    """Return the end of a group's file names. ``run/*.cov`` must match the samples of each rank once."""
    if group is None:
        return ".cov"
    import torch.distributed

    first = min(torch.distributed.get_process_group_ranks(group))
    return ".cov" if first == 0 else f".group-{first:05d}.replica"


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


def merge_recordings(paths: Iterable[Path], *, world_size: int | None = None) -> list[Coverage]:
    """Return the coverage of each epoch from the recordings of all ranks.

    Args:
        paths: The recordings, one file per rank.
        world_size: The number of ranks; by default, the one in the recordings.

    Raises:
        FormatError: If a file is not a recording, a rank has none or several, or the recordings are from different
            runs.
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
