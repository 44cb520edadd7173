"""CoverageRecorder: notes, from inside a training run, which samples a rank received; one small file a rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from shardio.check.allowance import goes_on
from shardio.check.claims import source_of
from shardio.check.coverage import Coverage
from shardio.check.identity import Key
from shardio.check.merging import merge
from shardio.check.recording import observe
from shardio.check.recording_file import Recording, dump_recording, load_recording, read_recording, write_recording
from shardio.errors import FormatError
from shardio.world import find_world


class CoverageRecorder:
    """Write down which samples this rank receives. A context manager; the file is written after each epoch.

    >>> with CoverageRecorder("run", key=2) as recorder:  # doctest: +SKIP
    ...     for epoch in range(10):
    ...         for images, labels, keys in recorder.watch(loader): ...

    ``shardio check --merge run/*.cov`` judges the recordings of all ranks.

    Args:
        directory: Where the file ``rank-00000.cov`` goes; made if it is not there. A former run's file becomes
            ``rank-00000.cov.old``.
        key: Where a batch has its keys, as for :func:`shardio.check.assert_exactly_once`.
        rank: This process; by default torch.distributed's or torchrun's rank.
        world_size: How many processes there are, likewise.
        resume: What :meth:`state_dict` returned when the checkpoint was written that training resumes from. The former
            run's file is continued from there; what it received after the checkpoint is left out.

    Raises:
        FormatError: If there is no such file, or it does not reach as far as the checkpoint.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        key: Key = None,
        rank: int | None = None,
        world_size: int | None = None,
        resume: Mapping[str, int] | None = None,
    ) -> None:
        world = find_world()
        if rank is None:
            rank, world_size = world.rank, world.world_size if world_size is None else world_size
        self.recording = Recording(rank=rank, world_size=world_size)
        self.path = Path(directory) / f"rank-{rank:05d}.cov"
        self._key = key
        self._is_resumed = resume is not None
        if resume is not None:
            self._continue(resume)
        elif self.path.exists():
            self.path.replace(f"{self.path}.old")
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
        coverage = self._start_epoch(loader)
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

        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, dump_recording(self.recording))
        return merge([load_recording(part, f"rank {rank}") for rank, part in enumerate(parts)], world_size=len(parts))

    def state_dict(self) -> dict[str, int]:
        """Write what was noted so far, and return how much that is: how many epochs, and batches of the last one.

        Save it in each checkpoint, beside the loader's own state.
        """
        self.close()
        known = self.epochs[-1].rank_epochs.get(self.rank) if self.epochs else None
        return {"num_epochs": len(self.epochs), "num_batches": 0 if known is None else known.num_batches}

    def _continue(self, state: Mapping[str, int]) -> None:
        """Take over what a former run noted until its checkpoint."""
        former = read_recording(self.path)
        if former.world_size != self.recording.world_size:
            raise FormatError(
                f"{self.path} was recorded on {former.world_size} ranks, and training resumes on "
                f"{self.recording.world_size}: record the rest of the run into another directory"
            )
        num_epochs, num_batches = state["num_epochs"], state["num_batches"]
        epochs = former.epochs[:num_epochs]
        last = epochs[-1].rank_epochs.get(self.rank) if epochs else None
        if len(epochs) < num_epochs or (last is not None and last.num_batches < num_batches):
            raise FormatError(
                f"{self.path} ends before batch {num_batches} of epoch {num_epochs - 1}, where the checkpoint was "
                "written: it is of another run"
            )
        self.recording.started = former.started
        self.epochs.extend(epochs)
        if last is not None and (last.num_batches > num_batches or not last.is_whole):
            self.epochs[-1] = self.epochs[-1].until(self.rank, num_batches)

    def _start_epoch(self, loader: Iterable[Any]) -> Coverage:
        """Return the coverage to add to: a new one, or that of the epoch that was interrupted by a checkpoint."""
        last = self.epochs[-1].rank_epochs.get(self.rank) if self._is_resumed and self.epochs else None
        self._is_resumed = False
        if last is not None and not last.is_whole:
            goes_on_here = goes_on(source_of(loader), last.num_batches)
            if goes_on_here:
                return self.epochs[-1]
            last.is_whole = goes_on_here is None
        self.epochs.append(Coverage())
        return self.epochs[-1]

    def close(self) -> None:
        """Write what was noted so far."""
        write_recording(self.path, self.recording)

    def __enter__(self) -> CoverageRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
