"""Faults of keys, of remainder policies and of recordings, and faults that stop the guard."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash

import shardio
from shardio import ShardDataset
from shardio.check import CoverageRecorder, ExpectedSamples, assert_exactly_once, guard
from tests.check.cases import Images, N, Registry, Shares, Tampered, all_of, check_ranks, cut, load, merge, ours

case = Registry()
wrong = case.once
NUMBERS: Any = range(N)
NOTHING = ExpectedSamples()

# Keys.

HALVES = [f"{number // 2:04d}" for number in NUMBERS]


def keyed(name: str, says: str, keys: Any, expected: Any) -> None:
    wrong(name, says, [{"id": keys}], expected, key="id")


wrong("keys that classes share, number expected", "perhaps the keys are not unique", cut(HALVES), N)
wrong("keys that classes share", "96 never, 48 unexpected", cut(HALVES), [f"c/{n:04d}" for n in NUMBERS])
keyed("NaN keys", "NaN cannot be the key", torch.tensor([0.0, float("nan"), float("nan")]), 3)
keyed("None keys", "None cannot be a sample's key", ["a", None, None], 3)
keyed("truth values as keys", "True cannot be a sample's key", torch.tensor([True, False]), 2)
keyed(
    "objects without a text as keys", "a SimpleNamespace cannot be the key", [SimpleNamespace(), SimpleNamespace()], 2
)
keyed("a key that is half a number too high", "1 never, 1 unexpected", torch.tensor([0.0, 1.5]), [0, 1])
wrong("images as keys", "a key must be one value per sample", [[torch.rand(2, 3, 4, 4), torch.arange(2)]], 2, key=0)
KINDS = "the delivered keys and the expected keys have different types"
wrong("text keys where numbers are expected", KINDS, cut([str(number) for number in NUMBERS]))
OTHER = "1 never, 1 unexpected"
wrong("-1 in place of 2^64 - 1", OTHER, [[0, -1]], [0, 2**64 - 1])
wrong("a key that is 2^64 too high", OTHER, [[0, 5 + 2**64]], [0, 5])
wrong("the hash of a text in place of the text", OTHER, [["b"], [xxhash.xxh3_64_intdigest(b"a")]], ["a", "b"])
IMAGES = [[torch.zeros(2, 3)], [torch.zeros(2, 3)]]
WANTED = "To identify samples, pass key="
wrong("equal images in plain batches", f"samples with equal data. {WANTED}", IMAGES, None)
wrong("keys expected of images", f"no keys to compare with the expected keys. {WANTED}", IMAGES[:1], ["a", "b"])
wrong("a key that no batch has", "nothing at key='id'", IMAGES[:1], 2, key="id")


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(len(samples), 3)


wrong("noise in collate_fn", "differ from one pass to the next", load([torch.zeros(3)] * 8, collate_fn=noisy), None)

# shardio's remainder policies, not kept to. 21 samples, 2 ranks, batches of 4.


def tampered(
    name: str, says: str, policy: str, rank: int, change: Callable[[list[Any]], Any], *, key: Any = None
) -> None:
    """Register two ranks, one of which delivers what a function makes of its batches."""

    def ask(packed: Path) -> None:
        ranks: list[Any] = [*ours(packed, remainder=policy)]
        ranks[rank] = Tampered(ranks[rank], change)
        check_ranks(ranks, all_of(packed), key=key)

    case(name, says)(ask)


def mark_first(made: list[Any]) -> list[Any]:
    made[0][1][0] = False
    return made


NOT_THOSE = "not the ones that the remainder policy selects"
tampered(
    "pad: another sample is repeated", NOT_THOSE, "pad", 1, lambda made: [*made[:-1], [*made[-1][:-1], made[0][1]]]
)
REPEATS = "2 more than once (2 repeats, 1 required by the remainder policy)"
tampered("pad: two repeats in place of one", REPEATS, "pad", 1, lambda made: [*made, [made[0][0]]])
tampered("keep: a rank loses its last sample", "1 never", "keep", 0, lambda made: [*made[:-1], made[-1][:-1]])
tampered(
    "mask: every sample twice, marked the second time",
    "marked as repeats, but the remainder policy marks 1",
    "mask",
    1,
    lambda made: [*made, *[(keys, torch.zeros_like(valid)) for keys, valid in made]],
    key=0,
)
tampered("mask: a sample is marked that is not a repeat", "1 never", "mask", 0, mark_first, key=0)


@case("pad: the repeat comes early, only the number known", "1 repeat came earlier")
def _(packed: Path) -> None:
    first, second = ours(packed)
    repeated = next(iter(ours(packed)[0]))[0]

    def early(made: list[Any]) -> list[Any]:
        return [[repeated, *made[0][1:]], *made[1:-1], [*made[-1][:-1], made[0][0]]]

    check_ranks([first, Tampered(second, early)], NOTHING)


@case("drop: other samples are left out", f"left out are {NOT_THOSE}")
def _(packed: Path) -> None:
    dropping = ours(packed, remainder="drop")
    tail = [key for loader in ours(packed, remainder="keep") for batch in list(loader)[2:] for key in batch]
    swap = Tampered(dropping[1], lambda made: [[tail[0], *made[0][1:]], *made[1:]])
    check_ranks([dropping[0], swap], all_of(packed))


@case("padding where each sample should come once", "use remainder='keep' or 'mask'")
def _(packed: Path) -> None:
    assert_exactly_once(tuple(ours(packed, 5)), list(ShardDataset(packed, fields="key", rank=0, world_size=1)))


@case("shardio: a rank has another seed", "in different epochs or orders")
def _(packed: Path) -> None:
    check_ranks([ours(packed)[0], ours(packed, seed=1)[1]], all_of(packed))


@case("shardio: a rank is an epoch ahead", "in different epochs or orders")
def _(packed: Path) -> None:
    first, second = ours(packed)
    second.set_epoch(1)
    check_ranks([first, second], all_of(packed))


@case("shardio: each rank takes itself for rank 0", "ranks 0 and 1 delivered the same 11 samples")
def _(packed: Path) -> None:
    check_ranks([ours(packed)[0], ours(packed)[0]], NOTHING)


# Recordings.


def recorded(directory: Path, rank: int, epochs: list[list[list[Any]]], world_size: int = 2) -> Path:
    with CoverageRecorder(directory, rank=rank, world_size=world_size) as recorder:
        for epoch in epochs:
            list(recorder.watch(epoch))
    return recorder.path


def recording(name: str, says: str) -> Callable[[Callable[[Path], object]], None]:
    """Register a function of an empty directory, whose recordings are judged afterwards."""

    def register(write: Callable[[Path], object]) -> None:
        def ask(packed: Path) -> None:
            with tempfile.TemporaryDirectory() as run:
                write(Path(run))
                merge(Path(run))

        case(name, says)(ask)

    return register


FIRST, SECOND = cut(range(0, N, 2)), cut(range(1, N, 2))


@recording("a rank's recording is missing", "no recording of rank 1 of 2")
def _(run: Path) -> None:
    recorded(run, 0, [FIRST])


@recording("a run with fewer ranks in the same directory", "runs with 2 and 3 ranks")
def _(run: Path) -> None:
    recorded(run, 2, [[[9]]], world_size=3)
    recorded(run, 0, [[[0]]])
    recorded(run, 1, [[[1]]])


@recording("a recording of yesterday's run", "they are from different runs")
def _(run: Path) -> None:
    old = CoverageRecorder(run, rank=1, world_size=2)
    old.recording.process, old.recording.started = "elsewhere:1", old.recording.started - 86_400
    list(old.watch([[1]]))
    old.path.write_bytes(old.path.read_bytes().replace(b'written\\": ', b'written\\":-'))
    recorded(run, 0, [[[0]]])


@recording("a crash in the middle of an epoch", "rank 1 stopped after 1 batch, before the end of the epoch")
def _(run: Path) -> None:
    recorded(run, 0, [FIRST])
    with CoverageRecorder(run, rank=1, world_size=2) as recorder:
        watched = recorder.watch(SECOND)
        next(watched)
        watched.close()  # type: ignore[attr-defined]  # it is a generator


@recording("a rank that recorded one epoch less", "rank 1 stopped after 0 batches")
def _(run: Path) -> None:
    recorded(run, 0, [FIRST, FIRST])
    recorded(run, 1, [SECOND])


@recording("a run resumes, but its loader restarts the epoch", "32 more than once")
def _(run: Path) -> None:
    recorder = CoverageRecorder(run, rank=0, world_size=1)
    states = [recorder.state_dict() for _ in recorder.watch(load(NUMBERS))]
    list(CoverageRecorder(run, rank=0, world_size=1, resume=states[3]).watch(load(NUMBERS)))


@recording("a run resumes on fewer ranks", "recorded with a world size of 3, but training resumes with 2")
def _(run: Path) -> None:
    state = CoverageRecorder(run, rank=0, world_size=3).state_dict()
    CoverageRecorder(run, rank=0, world_size=2, resume=state)


@recording("a run resumes, but another run has recorded since", "it is from another run")
def _(run: Path) -> None:
    recorder = CoverageRecorder(run, rank=0, world_size=1)
    list(recorder.watch(cut(NUMBERS)))
    state = recorder.state_dict()
    recorded(run, 0, [cut(range(8))], world_size=1)
    CoverageRecorder(run, rank=0, world_size=1, resume=state)


@recording("a recording by content of augmented images", "differs when it is read again")
def _(run: Path) -> None:
    with CoverageRecorder(run, rank=0, world_size=1) as recorder:
        list(recorder.watch(load(Images(0.1))))
    merge(run, ExpectedSamples(num_samples=N))


# The guard.


def guarded(name: str, says: str, loader: Any, *, epochs: int = 1) -> None:
    def ask(packed: Path) -> None:
        watched = guard(loader)
        for _ in range(epochs):
            list(watched)

    case(name, says)(ask)


REPEATS_3 = "batch 12 repeats 3, which batch 0 of this epoch delivered"
guarded("guard: a repeated key", REPEATS_3, [*cut(NUMBERS), [3]])
guarded("guard: augmented images without a key", "differs when it is read again", load(Images(0.1)))
guarded(
    "guard: a stream that augments its samples, after its second epoch",
    "change from one epoch to the next",
    load(Shares(lambda *_: (torch.rand(3) for _ in range(N)))),
    epochs=2,
)
EITHER = "it is either a repeat or another sample with equal data"
guarded("guard: equal images", EITHER, load([torch.zeros(3)] * 4))


@case("guard: shardio's images with a random crop", "a random transform (RandomResizedCrop)")
def _(packed: Path) -> None:
    transform = shardio.transforms.RandomResizedCrop(8)
    list(guard(ours(packed, 1, fields=("image", "label"), transform=transform)[0]))
