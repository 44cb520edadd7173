"""Right uses of WebDataset, shardio's loaders, recordings and the guard."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchdata.stateful_dataloader
import webdataset
from torch.utils.data import (
    DistributedSampler,
)

import shardio
from shardio import EpochSampler, ShardDataset, ShardMapDataset
from shardio.check import CoverageRecorder, ExpectedSamples, guard, merge_recordings
from tests.check.cases import (
    Images,
    Keyed,
    N,
    Registry,
    Shares,
    all_of,
    check_ranks,
    cut,
    load,
    merge,
    once,
    ours,
    raise_verdict,
)

case = Registry()
NOTHING = ExpectedSamples()


# WebDataset.


def web(packed: Path, **options: Any) -> Any:
    tars = sorted(map(str, packed.glob("*.tar")))
    return webdataset.WebDataset(tars, **{"shardshuffle": False, **options}).map(lambda sample: sample["__key__"])


@case("WebDataset with workers", slow=True)
def _(packed: Path) -> None:
    once(load(web(packed), num_workers=2), list(ShardDataset(packed, fields="key")))


@case("WebDataset, shuffled, two epochs")
def _(packed: Path) -> None:
    once(load(web(packed, shardshuffle=100).shuffle(100)), 21, epochs=2)


@case("WebDataset that batches by itself")
def _(packed: Path) -> None:
    once(
        webdataset.WebLoader(web(packed).batched(4, collation_fn=list), batch_size=None),
        list(ShardDataset(packed, fields="key")),
    )


# shardio's own, with 21 samples, 2 ranks and batches of 4.


@case("pad: the policy's own repeats")
def _(packed: Path) -> None:
    check_ranks(ours(packed), all_of(packed), epochs=3)
    check_ranks(ours(packed, 5), NOTHING, epochs=3)
    check_ranks(ours(packed, shuffle=False), all_of(packed), epochs=3)


@case("mask: repeats are marked")
def _(packed: Path) -> None:
    check_ranks(ours(packed, remainder="mask"), all_of(packed), key=0, epochs=3)


@case("mask: a key function that ignores marks")
def _(packed: Path) -> None:
    check_ranks(ours(packed, remainder="mask"), all_of(packed), key=lambda batch: batch[0])
    for loader in ours(packed, 25, remainder="mask"):
        list(guard(loader, key=lambda batch: batch[0]))


@case("keep: uneven ranks")
def _(packed: Path) -> None:
    check_ranks(ours(packed, 4, remainder="keep"), all_of(packed), epochs=3)


@case("drop: what fills no step is left out")
def _(packed: Path) -> None:
    check_ranks(ours(packed, remainder="drop"), all_of(packed), epochs=3)
    check_ranks(ours(packed, remainder="drop"), NOTHING)


@case("more ranks than samples")
def _(packed: Path) -> None:
    check_ranks(ours(packed, 25), all_of(packed))


@case("EpochSampler in torch's loader and in torchdata's")
def _(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    for kind in (torch.utils.data.DataLoader, torchdata.stateful_dataloader.StatefulDataLoader):
        ranks = [EpochSampler(dataset, rank=rank, world_size=2) for rank in range(2)]
        check_ranks([kind(dataset, batch_size=4, sampler=sampler) for sampler in ranks], all_of(packed))


@case("ShardDataset in torch's loader", slow=True)
def _(packed: Path) -> None:
    ranks = [ShardDataset(packed, fields="key", shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    check_ranks([load(dataset, num_workers=2) for dataset in ranks], all_of(packed))


@case("shardio's processes, images known by content", slow=True)
def _(packed: Path) -> None:
    once(shardio.DataLoader(ShardDataset(packed, shuffle=True), batch_size=4, num_workers=2), 21, epochs=2)


# Recordings and the guard.


@case("recordings of a run that pads, through a DevicePrefetcher")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        for rank, loader in enumerate(ours(packed)):
            with CoverageRecorder(run, rank=rank, world_size=2) as recorder:
                for _ in range(2):
                    with shardio.DevicePrefetcher(loader, device="cpu") as batches:
                        list(recorder.watch(batches))
        merge(Path(run))
        merge(Path(run), all_of(packed))


@case("a recording of an epoch that was resumed in the middle")
def _(packed: Path) -> None:
    loader, resumed = ours(packed, 1)[0], ours(packed, 1)[0]
    batches = iter(loader)
    next(batches), next(batches)
    resumed.load_state_dict(loader.state_dict())
    with tempfile.TemporaryDirectory() as run:
        with CoverageRecorder(run, rank=0, world_size=1) as recorder:
            list(recorder.watch(resumed))
        merge(Path(run), all_of(packed))


def resumed(packed: Path, run: str, at: int) -> None:
    """Record two epochs on two ranks that end some batches after a checkpoint, and resume from it."""
    for rank, (loader, again) in enumerate(zip(ours(packed), ours(packed), strict=True)):
        first = CoverageRecorder(run, rank=rank, world_size=2)
        states: list[Any] = []
        for _ in range(2):
            states.extend((loader.state_dict(), first.state_dict()) for _ in first.watch(loader))
        again.load_state_dict(states[at][0])
        with CoverageRecorder(run, rank=rank, world_size=2, resume=states[at][1]) as second:
            for _ in range(2):
                list(second.watch(again))


@case("recordings that resume at a checkpoint: in the middle of an epoch, and at its last batch")
def _(packed: Path) -> None:
    for at, num_epochs in ((1, 2), (2, 3), (4, 3)):  # An epoch has three batches.
        with tempfile.TemporaryDirectory() as run:
            resumed(packed, run, at)
            found = merge_recordings(sorted(Path(run).glob("*.cov")))
            assert [epoch.num_deliveries for epoch in found] == [22] * num_epochs
            raise_verdict(found, all_of(packed))


@case("a recording of torchdata's loader that resumes at a checkpoint")
def _(packed: Path) -> None:
    dataset: Any = list(range(N))
    first, second = (torchdata.stateful_dataloader.StatefulDataLoader(dataset, batch_size=8) for _ in range(2))
    with tempfile.TemporaryDirectory() as run:
        recorder = CoverageRecorder(run, rank=0, world_size=1)
        states = [(first.state_dict(), recorder.state_dict()) for _ in recorder.watch(first)]
        second.load_state_dict(states[4][0])
        list(CoverageRecorder(run, rank=0, world_size=1, resume=states[4][1]).watch(second))
        found = merge_recordings([recorder.path])
        assert [epoch.num_deliveries for epoch in found] == [N]
        raise_verdict(found, ExpectedSamples.of_keys(range(N)))


@case("a recording whose loop ends with the last batch")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        with CoverageRecorder(run, rank=0, world_size=1) as recorder:
            loader = load(range(N))
            list(zip(range(len(loader)), recorder.watch(loader), strict=False))
        merge(Path(run))


@case("recordings where one rank gets no batches")
def _(packed: Path) -> None:
    with tempfile.TemporaryDirectory() as run:
        for rank in range(2):
            with CoverageRecorder(run, rank=rank, world_size=2) as recorder:
                list(recorder.watch(cut(range(N)) if rank == 0 else []))
        merge(Path(run), ExpectedSamples.of_keys(range(N)))


@case("guard: images, three epochs, on one rank and on one of two")
def _(packed: Path) -> None:
    dataset: Any = Images()
    samplers: list[Any] = [None, DistributedSampler(dataset, 2, 0)]
    for sampler in samplers:
        guarded = guard(load(dataset, sampler=sampler, shuffle=None if sampler else True))
        for epoch in range(3):
            if sampler:
                sampler.set_epoch(epoch)
            assert len(list(guarded)) == len(guarded)


@case("guard: augmented images with keys, and both ranks of shardio")
def _(packed: Path) -> None:
    list(guard(load(Keyed(0.1)), key="id"))
    for loader in ours(packed, remainder="mask"):
        list(guard(loader, key=0))


@case("guard: a stream, three epochs")
def _(packed: Path) -> None:
    def stream(worker: int, of: int) -> Iterator[torch.Tensor]:
        return (torch.full((2, 2), number) for number in range(N))

    guarded = guard(load(Shares(stream)))
    for _ in range(3):
        list(guarded)


@case("guard: an epoch that was resumed, and the next one")
def _(packed: Path) -> None:
    loader, resumed = (ours(packed, 1, fields=("image", "label"))[0] for _ in range(2))
    next(iter(loader))
    resumed.load_state_dict(loader.state_dict())
    guarded = guard(resumed)
    assert [len(list(guarded)) for _ in range(3)] == [5, 6, 6]
