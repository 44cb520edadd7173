"""Unusual loaders, batches, keys and runs that are correct. The checker asks for keys if it cannot identify samples."""

from __future__ import annotations

import random
import tempfile
import uuid
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DistributedSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    random_split,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import shardio
from shardio import EpochSampler, ShardDataset, ShardMapDataset
from shardio.check import CoverageRecorder, ExpectedSamples, assert_exactly_once, guard, merge_recordings
from tests.check.cases import (
    B,
    Flipped,
    Images,
    Keyed,
    N,
    Registry,
    all_of,
    by,
    check_ranks,
    cut,
    load,
    merge,
    ours,
    raise_verdict,
    split as samplers,
    web,
)
from tests.loader.programs import Shares

case = Registry()
NUMBERS: Any = range(N)
NOTHING = ExpectedSamples()
WANTED = "key="


def right(name: str, loader: Any, expected: Any = NUMBERS, *, says: str = "", **options: Any) -> None:
    case.once(name, says, loader, expected, **options)


# torch's loader.

SPLIT = Shares(lambda worker, of: range(worker, N, of))
UNEVEN = Shares(lambda worker, of: range(90) if worker == 0 else range(90, N))
right("torch, nothing expected", load(NUMBERS), None)
right("torch, shuffled, a short last batch, three epochs", load(range(N + 3), shuffle=True), range(N + 3), epochs=3)
right("torch, unshuffled, three epochs, nothing expected", load(Images()), None, epochs=3)
right("torch, unshuffled, three epochs, expected number given", load(Images()), N, epochs=3)
right("workers", load(NUMBERS, num_workers=2), slow=True)
PERSISTENT: Any = {"num_workers": 2, "persistent_workers": True}
right("persistent workers, three epochs", load(NUMBERS, shuffle=True, **PERSISTENT), epochs=3, slow=True)
right("batches in the order of completion", load(NUMBERS, num_workers=2, in_order=False), slow=True)
right("a stream that splits by worker", load(SPLIT, num_workers=3), epochs=2, slow=True)
right("workers with uneven shares", load(UNEVEN, num_workers=2), slow=True)
right("torchdata's loader", lambda: StatefulDataLoader(Images(), batch_size=B, shuffle=True), None, epochs=2)
right("a part from SubsetRandomSampler", load(Images(), sampler=SubsetRandomSampler(range(10, 50))), None)
PARTS: list[Any] = [NUMBERS[:50], NUMBERS[50:]]
right("datasets end to end", load(ConcatDataset(PARTS), shuffle=True))
right("datasets in a chain", load(ChainDataset([Shares(lambda *_: PARTS[0]), Shares(lambda *_: PARTS[1])])))
right("a user-defined batch sampler, nothing expected", load(Images(), batch_size=1, batch_sampler=PARTS), None)
WEIGHTED = WeightedRandomSampler([1.0 + n for n in NUMBERS], N, replacement=False)
right("a weighted sampler without replacement", load(NUMBERS, sampler=WEIGHTED))
right("DistributedSampler, unshuffled, three epochs", by(samplers(Images(), shuffle=False)), None, epochs=3)
right("DistributedSampler drops nothing", by(samplers(NUMBERS, 4, drop_last=True)))
right("DistributedSampler with workers", by(samplers(NUMBERS, 4), num_workers=1), slow=True)
OWN_SETS = [(0, 70), (70, 71), (71, N)]
right("ranks with uneven datasets", tuple(load(list(range(*borders)), shuffle=True) for borders in OWN_SETS), None)
right("one rank of two has nothing to do", (cut(range(5)), []), range(5))


FIRST, SECOND = random_split(Images(), [60, 36])
right("a part of a dataset from random_split", load(FIRST), None)
right("the other part, shuffled", load(SECOND, shuffle=True), None)
DROPPING = by(samplers(range(N + 1), 4, drop_last=True), drop_last=True)
case("DistributedSampler with drop_last that drops, by the command, nothing expected")(
    lambda packed: check_ranks(DROPPING, NOTHING)
)


# The order is the same in several epochs, on purpose or by chance.

MIXED: Any = random.Random(0).sample(NUMBERS, N)


class Sorted(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(N), key=lambda number: (number % 10, number)))

    def __len__(self) -> int:
        return N


class OwnOrder(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(MIXED[self.rank :: self.num_replicas])


class Few:
    rng = random.Random(1)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.rng.sample(cut(MIXED, 32), 3))


right("a fixed sampler, two epochs", load(NUMBERS, sampler=MIXED), epochs=2)
right("a fixed sampler, two epochs, expected number given", load(NUMBERS, sampler=MIXED), N, epochs=2)
right("a sampler that sorts, two epochs", load(NUMBERS, sampler=Sorted()), epochs=2)
right("a subclass with a fixed order", by([OwnOrder(NUMBERS, 2, rank) for rank in range(2)]), epochs=2)
right("a Subset of a permutation, two epochs", load(Subset(NUMBERS, MIXED)), epochs=2)
right("plain batches of a permutation, on two ranks", (cut(MIXED[::2]), cut(MIXED[1::2])), epochs=2)
SUBSET = BatchSampler(SubsetRandomSampler(range(10, 50)), B, False)
right("BatchSampler around SubsetRandomSampler", load(Images(), batch_size=1, batch_sampler=SUBSET), None)
right("three fixed batches in random order", load(NUMBERS, batch_size=1, batch_sampler=Few()), epochs=8)
right("three samples, shuffled, twenty epochs", load(range(3), shuffle=True, batch_size=2), range(3), epochs=20)


@case("DistributedSampler, alone and in a BatchSampler, two epochs")
def _(packed: Path) -> None:
    chosen = samplers(NUMBERS)

    def set_epoch(epoch: int) -> None:
        for sampler in chosen:
            sampler.set_epoch(epoch)

    batched = tuple(load(NUMBERS, batch_size=1, batch_sampler=BatchSampler(one, B, drop_last=False)) for one in chosen)
    for expected, ranks in ((NUMBERS, by(chosen)), (NUMBERS, batched), (None, batched)):
        assert_exactly_once(ranks, expected, epochs=2, set_epoch=set_epoch)


# Batches.


def padded(samples: list[Any]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def twofold(samples: list[Any]) -> Any:
    return torch.stack([sample["image"] for sample in samples] * 2), [sample["id"] for sample in samples]


def first_values(images: Any) -> list[int]:
    return [int(image[0, 0, 0]) for image in images]


def even(number: int) -> torch.Tensor:
    return torch.full((2, 2), number)


def stream(make: Callable[[int], Any], order: Any = NUMBERS, **options: Any) -> Any:
    return load(Shares(lambda worker, of: (make(number) for number in order)), **options)


TEXTS = [f"text {number}" for number in NUMBERS]
PAIRS = [(number, number % 3) for number in NUMBERS]
pair = namedtuple("pair", ["image", "id"])
right("no batches, and none expected", [], [])
right("empty batches, batches of one, a generator", lambda: (batch for batch in [[], *cut(NUMBERS, 1), []]))
right("dicts", load(Keyed()), key="id")
right("tuples", load([(torch.zeros(2), number) for number in NUMBERS]), key=1)
right("namedtuples, by a field's name", load([pair(torch.zeros(2), number) for number in NUMBERS]), key="id")
right("single dicts, not collated", load(Keyed(), batch_size=None), key="id")
right("single pairs, not collated", load([(text, 1) for text in TEXTS], batch_size=None), None, key=0)
right("batches made by the dataset", load(Shares(lambda *_: iter(cut(TEXTS))), batch_size=None), N)
right("samples in a list, not in columns", load(Images(), collate_fn=list), N, key=first_values)
right("augmented images with keys", load(Keyed(0.1), shuffle=True), N, key="id", epochs=2)
right("two crops of each image, with keys", load(Keyed(0.1), collate_fn=twofold), N, key=1)
right("bfloat16 images", load([even(number).bfloat16() for number in NUMBERS]), N)
right("a stream without a length, identified by content", stream(even), N)
right("a shuffled stream of images", load(Shares(lambda *_: map(even, random.sample(NUMBERS, N)))), None)
right("pairs that were not collated, without keys", load(PAIRS, batch_size=None), N, says=WANTED)
right("a stream of pairs, without keys", stream(PAIRS.__getitem__, batch_size=None), N, says=WANTED)
right("plain tuples, without keys", PAIRS, N, says=WANTED)
ONCE = "an iterator can be read only once"
right("a stream that can be read only once", stream(int, iter(NUMBERS)), None, says=ONCE)
right("images that can be read only once", stream(even, iter(NUMBERS)), None, says=ONCE)

# Equal data.

EQUAL = [torch.full((3,), number // 2) for number in NUMBERS]
right("equal images, with keys", load([{"image": torch.zeros(3), "id": number} for number in NUMBERS]), N, key="id")
right("equal images, as often as in the dataset", load(EQUAL, shuffle=True), None)
right("equal texts", load([f"text {number // 2}" for number in NUMBERS], shuffle=True), None)
right("equal images, expected number given", load(EQUAL), N, says=WANTED)
right("augmented images without keys", load(Flipped()), N, says=WANTED)
SEQUENCES = [torch.arange(number + 1) for number in NUMBERS]
right("sequences padded to the longest in a batch", load(SEQUENCES, collate_fn=padded), None, says=WANTED)
right("samples in a list, without keys", load(Images(), collate_fn=list), N, says=WANTED)
CROPS = {"collate_fn": lambda samples: torch.cat([torch.stack(samples)] * 2)}
right("two crops of each image, without keys", load(Images(), **CROPS), N, says=WANTED)
right("single samples, not collated, without keys", load(Images(), batch_size=None), N, says=WANTED)

# Keys.

right("bytes where text is expected", [[b"a", b"b"], [b"c"]], ["a", "b", "c"])
FRAMES = [(video, frame) for video in range(8) for frame in range(12)]
right("keys of two numbers", load([{"id": torch.tensor(frame)} for frame in FRAMES]), FRAMES, key="id")
HUGE = [-1, 2**64 - 1, 2**63, -(2**63), 2**64 + 5, 5]
right("negative and huge numbers", [HUGE], HUGE)
ALIKE = [1, "1", 2, "2", 1.5, "1.5"]
right("numbers and text that look the same", [{"id": ALIKE}], ALIKE, key="id")
right("whole numbers as floats", load([{"id": float(number)} for number in NUMBERS]), key="id")
right("NumPy numbers, one by one", cut(list(np.arange(N))), np.int64(N))
right("NumPy numbers as expected keys", [{"id": list(torch.arange(N))}], np.arange(N), key="id")
IDS = [uuid.UUID(int=number) for number in range(20)]
right("UUIDs", [{"id": batch} for batch in cut(IDS)], IDS, key="id")
right("paths", [{"id": [Path("a/b"), Path("a/c")]}], ["a/b", "a/c"], key="id")
right("text in numpy arrays", [np.array(batch) for batch in cut(TEXTS)], TEXTS)
right("expected as a set, unshuffled, two epochs", load(TEXTS), set(TEXTS), epochs=2)

# WebDataset.


def of_keys(name: str, make: Callable[[Path], Any], *, slow: bool = False, **options: Any) -> None:
    def ask(packed: Path) -> None:
        assert_exactly_once(make(packed), list(ShardDataset(packed, fields="key")), **options)

    case(name, slow=slow)(ask)


of_keys("WebDataset with workers", lambda packed: load(web(packed), num_workers=2), slow=True)
of_keys("WebDataset, shuffled, two epochs", lambda packed: load(web(packed, shardshuffle=100).shuffle(100)), epochs=2)
of_keys(
    "WebDataset that batches by itself",
    lambda packed: webdataset.WebLoader(web(packed).batched(4, collation_fn=list), batch_size=None),
)
of_keys("WebDataset that shuffles only its four shards", lambda packed: load(web(packed, shardshuffle=100)), epochs=12)

# shardio's datasets, with 21 samples, 2 ranks and batches of 4


def of_ours(name: str, world_size: int = 2, *, expects: bool = True, epochs: int = 3, **options: Any) -> None:
    key = options.pop("key", None)

    def ask(packed: Path) -> None:
        ranks = ours(packed, world_size, **options)
        check_ranks(ranks, all_of(packed) if expects else NOTHING, epochs=epochs, key=key)

    case(name)(ask)


of_ours("pad: the policy's own repeats")
of_ours("pad: nothing expected", 5, expects=False)
of_ours("pad: more ranks than samples", 25, epochs=1)
of_ours("pad: unshuffled", shuffle=False)
of_ours("mask: repeats are marked", remainder="mask", key=0)
of_ours("mask: a key function that ignores marks", remainder="mask", key=lambda batch: batch[0], epochs=1)
of_ours("keep: uneven ranks", 4, remainder="keep")
of_ours("drop: samples that do not fill a step are left out", remainder="drop")
of_ours("drop: nothing expected", remainder="drop", expects=False, epochs=1)


@case("guard: a key function that ignores marks")
def _(packed: Path) -> None:
    for loader in ours(packed, 25, remainder="mask"):
        list(guard(loader, key=lambda batch: batch[0]))


def valid(batch: Any) -> list[str]:
    return [key for key, is_valid in zip(*batch, strict=True) if is_valid]


HEEDING: dict[str, Any] = {"key": valid, "epochs": 2}
of_keys("mask: a key function that respects marks", lambda packed: tuple(ours(packed, 5, remainder="mask")), **HEEDING)
of_keys("keep: by the function", lambda packed: tuple(ours(packed, 5, remainder="keep")), epochs=2)


@case("EpochSampler in torch's loader and in torchdata's")
def _(packed: Path) -> None:
    dataset = ShardMapDataset(packed, fields="key")
    for kind in (torch.utils.data.DataLoader, StatefulDataLoader):
        ranks = [EpochSampler(dataset, rank=rank, world_size=2) for rank in range(2)]
        check_ranks([kind(dataset, batch_size=4, sampler=sampler) for sampler in ranks], all_of(packed))


@case("ShardDataset in torch's loader", slow=True)
def _(packed: Path) -> None:
    ranks = [ShardDataset(packed, fields="key", shuffle=True, rank=rank, world_size=2) for rank in range(2)]
    check_ranks([load(dataset, num_workers=2) for dataset in ranks], all_of(packed))


@case("images identified by content, in torch's and shardio's processes", slow=True)
def _(packed: Path) -> None:
    assert_exactly_once(load(ShardMapDataset(packed), num_workers=2))
    loader = shardio.DataLoader(ShardDataset(packed, shuffle=True), batch_size=4, num_workers=2)
    assert_exactly_once(loader, 21, epochs=2)


# Recordings and the guard.


def recording(name: str) -> Callable[[Callable[[Path, Path], object]], None]:
    """Register a function that writes recordings into an empty directory and returns the expected samples."""

    def register(write: Callable[[Path, Path], object]) -> None:
        def ask(packed: Path) -> None:
            with tempfile.TemporaryDirectory() as run:
                merge(Path(run), write(packed, Path(run)))  # type: ignore[arg-type]  # expected samples, or None

        case(name)(ask)

    return register


@recording("recordings of a run that pads, through a DevicePrefetcher")
def _(packed: Path, run: Path) -> ExpectedSamples:
    for rank, loader in enumerate(ours(packed)):
        with CoverageRecorder(run, rank=rank, world_size=2) as recorder:
            for _ in range(2):
                with shardio.DevicePrefetcher(loader, device="cpu") as batches:
                    list(recorder.watch(batches))
    merge(run)
    return all_of(packed)


@recording("a recording of an epoch that was resumed in the middle")
def _(packed: Path, run: Path) -> ExpectedSamples:
    loader, again = ours(packed, 1)[0], ours(packed, 1)[0]
    batches = iter(loader)
    next(batches), next(batches)
    again.load_state_dict(loader.state_dict())
    with CoverageRecorder(run, rank=0, world_size=1) as recorder:
        list(recorder.watch(again))
    return all_of(packed)


def resumed(packed: Path, run: str, at: int) -> None:
    """Record two epochs on two ranks, then resume both ranks from earlier checkpoints, taken after batch ``at``."""
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


@recording("a recording of torchdata's loader that resumes at a checkpoint")
def _(packed: Path, run: Path) -> ExpectedSamples:
    first, second = (StatefulDataLoader(NUMBERS, batch_size=8) for _ in range(2))
    recorder = CoverageRecorder(run, rank=0, world_size=1)
    states = [(first.state_dict(), recorder.state_dict()) for _ in recorder.watch(first)]
    second.load_state_dict(states[4][0])
    list(CoverageRecorder(run, rank=0, world_size=1, resume=states[4][1]).watch(second))
    assert [epoch.num_deliveries for epoch in merge_recordings([recorder.path])] == [N]
    return ExpectedSamples.of_keys(NUMBERS)


@recording("a recording whose loop ends with the last batch")
def _(packed: Path, run: Path) -> None:
    with CoverageRecorder(run, rank=0, world_size=1) as recorder:
        loader = load(NUMBERS)
        list(zip(range(len(loader)), recorder.watch(loader), strict=False))


@recording("recordings where one rank gets no batches")
def _(packed: Path, run: Path) -> ExpectedSamples:
    for rank in range(2):
        with CoverageRecorder(run, rank=rank, world_size=2) as recorder:
            list(recorder.watch(cut(NUMBERS) if rank == 0 else []))
    return ExpectedSamples.of_keys(NUMBERS)


@case("guard: images, three epochs, on one rank and on one of two")
def _(packed: Path) -> None:
    for sampler in (None, samplers(Images())[0]):
        guarded = guard(load(Images(), sampler=sampler, shuffle=None if sampler else True))
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
    guarded = guard(stream(even))
    for _ in range(3):
        list(guarded)


@case("guard: an epoch that was resumed, and the next one")
def _(packed: Path) -> None:
    loader, again = (ours(packed, 1, fields=("image", "label"))[0] for _ in range(2))
    next(iter(loader))
    again.load_state_dict(loader.state_dict())
    guarded = guard(again)
    assert [len(list(guarded)) for _ in range(3)] == [5, 6, 6]
