"""Faults of recordings, and faults that stop the guard."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import (
    IterableDataset,
)

import shardio
from shardio.check import CoverageRecorder, ExpectedSamples, guard
from tests.check.cases import (
    Images,
    N,
    Registry,
    cut,
    load,
    merge,
    ours,
)

case = Registry()


# Recordings.


def recorded(directory: str, rank: int, epochs: list[list[list[Any]]], world_size: int = 2) -> Path:
    with CoverageRecorder(directory, rank=rank, world_size=world_size) as recorder:
        for epoch in epochs:
            list(recorder.watch(epoch))
    return recorder.path


@case("a rank's recording is missing", "no recording of rank 1 of 2")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        recorded(run, 0, [cut(range(0, N, 2))])
        merge(Path(run))


@case("a run with fewer ranks in the same directory", "runs with 2 and 3 ranks")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        recorded(run, 2, [[[9]]], world_size=3)
        recorded(run, 0, [[[0]]])
        recorded(run, 1, [[[1]]])
        merge(Path(run))


@case("a recording of yesterday's run", "they are from different runs")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        old = CoverageRecorder(run, rank=1, world_size=2)
        old.recording.process, old.recording.started = "elsewhere:1", old.recording.started - 86_400
        list(old.watch([[1]]))
        content = old.path.read_bytes().replace(b'written\\": ', b'written\\":-')
        old.path.write_bytes(content)
        recorded(run, 0, [[[0]]])
        merge(Path(run))


@case("a crash in the middle of an epoch", "rank 1 stopped after 1 batch, before the end of the epoch")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        recorded(run, 0, [cut(range(0, N, 2))])
        with CoverageRecorder(run, rank=1, world_size=2) as recorder:
            watched = recorder.watch(cut(range(1, N, 2)))
            next(watched)
            watched.close()  # type: ignore[attr-defined]  # it is a generator
        merge(Path(run))


@case("a rank that recorded one epoch less", "rank 1 stopped after 0 batches")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        recorded(run, 0, [cut(range(0, N, 2)), cut(range(0, N, 2))])
        recorded(run, 1, [cut(range(1, N, 2))])
        merge(Path(run))


@case("a run resumes, but its loader restarts the epoch", "32 more than once")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        recorder = CoverageRecorder(run, rank=0, world_size=1)
        states = [recorder.state_dict() for _ in recorder.watch(load(range(N)))]
        list(CoverageRecorder(run, rank=0, world_size=1, resume=states[3]).watch(load(range(N))))
        merge(Path(run))


@case(
    "a run resumes on fewer ranks, in the same directory",
    "recorded with a world size of 3, but training resumes with 2",
)
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        state = CoverageRecorder(run, rank=0, world_size=3).state_dict()
        CoverageRecorder(run, rank=0, world_size=2, resume=state)


@case("a run resumes, but another run has recorded since", "it is from another run")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        recorder = CoverageRecorder(run, rank=0, world_size=1)
        list(recorder.watch(cut(range(N))))
        state = recorder.state_dict()
        recorded(run, 0, [cut(range(8))], world_size=1)
        CoverageRecorder(run, rank=0, world_size=1, resume=state)


@case("a recording by content of augmented images", "differs when it is read again")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        with CoverageRecorder(run, rank=0, world_size=1) as recorder:
            list(recorder.watch(load(Images(0.1))))
        merge(Path(run), ExpectedSamples(num_samples=N))


# The guard.


@case("guard: a repeated key", "batch 12 repeats 3, which batch 0 of this epoch delivered")
def _(packed: Path) -> None:
    list(guard([*cut(range(N)), [3]]))


@case("guard: augmented images without a key", "differs when it is read again")
def _(packed: Path) -> None:
    list(guard(load(Images(0.1))))


@case("guard: shardio's images with a random crop", "a random transform (RandomResizedCrop)")
def _(packed: Path) -> None:
    transform = shardio.transforms.RandomResizedCrop(8)
    list(guard(ours(packed, 1, fields=("image", "label"), transform=transform)[0]))


@case("guard: a stream that augments its samples, after its second epoch", "change from one epoch to the next")
def _(packed: Path) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (torch.rand(3) for _ in range(N))

    guarded = guard(load(Stream()))
    list(guarded)
    list(guarded)


@case("guard: equal images", "it is either a repeat or another sample with equal data")
def _(packed: Path) -> None:
    list(guard(load([torch.zeros(3)] * 4)))
