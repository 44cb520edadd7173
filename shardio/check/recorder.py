"""CoverageRecorder: record which samples each rank receives in a training run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from shardio.check.allowance import resumes
from shardio.check.claims import source_of
from shardio.check.coverage import Coverage
from shardio.check.identity import Key
from shardio.check.merging import merge
from shardio.check.recording import observe
from shardio.check.recording_file import Recording, dump_recording, load_recording, read_recording, write_recording
from shardio.errors import FormatError
from shardio.whole_writes import remove_unfinished
from shardio.world import choose_world, find_data_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class CoverageRecorder:
    """A context manager that records which samples this rank receives.

    It writes its file after each epoch.

    >>> with CoverageRecorder("run", key=2) as recorder:  # doctest: +SKIP
    ...     for epoch in range(10):
    ...         for images, labels, keys in recorder.watch(loader): ...

    ``shardio check --merge run/*.cov`` checks the recordings of all ranks.

    Args:
        directory: The directory for each rank's file, such as ``rank-00000.cov``. The directory is
            created if it is missing. The file of an earlier run is renamed, for
            example to ``rank-00000.cov.old``.
        key: How to find a batch's keys, as in :func:`shardio.check.assert_exactly_once`.
        rank: The rank of this process; by default, that of torch.distributed or torchrun.
        world_size: The number of ranks; by default, that of torch.distributed or torchrun, or
            unknown if ``rank`` is given.
        mesh: An alternative to ``rank`` and ``world_size``, as for the dataset. Groups along the mesh other than that
            of rank 0 write files such as ``rank-00000.group-00001.replica``, named after the first rank of the group.
        group: Another alternative: a process group, as for the dataset.
        resume: The result of :meth:`state_dict` in the checkpoint that training resumes from. The
            recording in the file continues from there, without its later entries.

    Raises:
        FormatError: If the file to resume is missing, ends before the checkpoint, or was recorded
            with a different number of ranks.
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
            IdentityError: If a key does not identify a sample, or a batch cannot be split into
                samples.
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
        """Write the recording to its file; return the number of epochs, and of batches in the last epoch.

        Save the result in each checkpoint, together with the loader's state.
        """
        self.close()
        known = self.epochs[-1].rank_epochs.get(self.rank) if self.epochs else None
        return {"num_epochs": len(self.epochs), "num_batches": 0 if known is None else known.num_batches}

    def _continue(self, state: Mapping[str, int]) -> None:
        """Load what the earlier run recorded before its checkpoint."""
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
        """Return the coverage to add to: a new one, or that of the epoch that is resumed."""
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
    """Return the end of the file names of a group: ``run/*.cov`` must name each rank's samples once."""
    if group is None:
        return ".cov"
    import torch.distributed

    first = min(torch.distributed.get_process_group_ranks(group))
    return ".cov" if first == 0 else f".group-{first:05d}.replica"
