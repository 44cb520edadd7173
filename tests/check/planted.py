"""Faults that the checker must find in samples, workers, ranks, keys, remainder policies, recordings and the guard."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from shardio import ShardDataset
from shardio.check import CoverageRecorder, ExpectedSamples, assert_exactly_once, guard
from shardio.transforms import RandomResizedCrop
from tests.check.cases import (
    B,
    Flipped,
    Images,
    N,
    Registry,
    Tampered,
    all_of,
    by,
    check_ranks,
    cut,
    load,
    merge,
    ours,
    split,
    web,
)
from tests.loader.programs import Shares

case = Registry()
wrong = case.once
MILLION = 10**6
NUMBERS: Any = range(N)
NOTHING = ExpectedSamples()
BATCHES = cut(NUMBERS)


def numbers(**options: Any) -> Any:
    return load(NUMBERS, **options)


# Repeated samples in one stream


def millions(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[torch.Tensor]:
    numbers = torch.arange(MILLION) * 999_983 % MILLION  # Multiplying by a prime scatters all numbers.
    return iter(change(numbers).split(10_000))


def millions_with(row: int) -> Iterator[torch.Tensor]:
    return millions(lambda numbers: torch.cat([numbers[:5], torch.tensor([row]), numbers[6:]]))


def with_copy() -> Iterator[torch.Tensor]:
    return millions(lambda numbers: torch.cat([numbers, numbers[5:6]]))


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()
        yield from super().__iter__()


OTHER = "1 never, 1 unexpected"
REPEATED = "1 more than once, 1 never"
wrong("1 sample of 10^6 twice", "1 more than once", with_copy, MILLION, slow=True)
wrong("1 of 10^6 samples replaced by another", REPEATED, lambda: millions_with(77), range(MILLION), slow=True)
wrong("1 unexpected sample of 10^6", OTHER, lambda: millions_with(-1), range(MILLION), slow=True)
SAME = "hold the same samples"
wrong("the first batch twice", f"batch 0 of rank 0 and batch 1 of rank 0 {SAME}", [BATCHES[0], *BATCHES], N)
EVEN, ODD = cut(range(0, N, 2)), cut(range(1, N, 2))
LAST_TWICE = f"batch 5 of rank 1 and batch 6 of rank 1 {SAME}"
wrong("the last batch twice on one rank of two", LAST_TWICE, (EVEN, [*ODD, ODD[-1]]))
wrong("two epochs in one, expected number given", f"{N} more than once", [*BATCHES, *BATCHES], N)
TWICE = "each sample is delivered 2 times"
AUGMENTED = Twice(Images(0.1), batch_size=B)
wrong("all twice, different keys, expected number given", TWICE, cut([f"{i}-{n}" for i in "ab" for n in NUMBERS]), N)
wrong("all twice, augmented, expected number given", TWICE, AUGMENTED, N)
wrong("all twice, flipped at random, expected number given", TWICE, Twice(Flipped(), batch_size=B), N)
wrong("all twice, augmented, nothing expected", TWICE, AUGMENTED, None)


class Sized(Shares):
    def __len__(self) -> int:
        return N


def by_command(name: str, says: str, *ranks: Any) -> None:
    case(name, says)(lambda packed: check_ranks(ranks, NOTHING))


TOO_MANY = "2 times the 96 that its loader has"
by_command("all twice, augmented, nothing expected, by the command", TOO_MANY, AUGMENTED)
TOO_LONG = Sized(lambda *_: (torch.rand(3) for _ in range(2 * N)))
by_command("an iterable dataset with a length delivers every sample twice", TOO_MANY, load(TOO_LONG))
WRONG: Any = [*range(N - 1), 0]  # Sample 0 replaces the last sample.
CHANGES = "changes from epoch to epoch"
wrong("augmented, and a wrong sample", CHANGES, load(Images(0.1), sampler=WRONG), N)
wrong("flipped at random, and a wrong sample", "pass key=", load(Flipped(), sampler=WRONG), N)
NOISE = Shares(lambda *_: (torch.rand(3) + number for number in WRONG))
wrong("an augmented stream, and a wrong sample", CHANGES, load(NOISE), N)
wrong("augmented batches, read once", "could not be read twice", lambda: (torch.rand(B, 3) for _ in range(N // B)), N)
AGAIN = "samples with replacement"
wrong("replacement", f"the sampler (RandomSampler) {AGAIN}", numbers(sampler=RandomSampler(NUMBERS, True)))
WEIGHTED = WeightedRandomSampler([1.0] * N, N)
wrong("weighted replacement", f"the sampler (WeightedRandomSampler) {AGAIN}", numbers(sampler=WEIGHTED))
wrong("indices from random.choices", "sampled with replacement", cut(random.Random(0).choices(NUMBERS, k=N)))
FIFTY = RandomSampler(NUMBERS, num_samples=50)
wrong("too few indices", "has 50 indices, but the dataset has 96", numbers(sampler=FIFTY), None)
wrong("a retry delivers the sample again", "1 more than once", cut([*range(50), 49, *range(50, N)]), NUMBERS)
wrong("a bad sample's neighbor instead", REPEATED, cut([n - (n == 40) for n in NUMBERS]))
wrong("parts that share ten", "10 more than once", load(ConcatDataset([NUMBERS[:50], NUMBERS[40:]])), NUMBERS)
wrong("one dataset twice in a chain", "96 more than once", load(ChainDataset([Shares(lambda *_: NUMBERS)] * 2)))
PADS = "are in the last batch of a rank or worker: the loader pads"
wrong("padding by repeating", f"all repeats (4) {PADS}", cut([*NUMBERS, *range(4)], 10))

# Samples that are lost.

ENDS = "samples are missing: drop_last is set, or a loop ends one batch early"
wrong("the last batch is lost", f"the last 8 of 96 {ENDS}", BATCHES[:-1])
LOSING = Tampered(numbers(shuffle=True), lambda made: made[:-1])
wrong("the last batch of a shuffled loader is lost", "8 never", LOSING, None)
wrong("the same, and its cause", f"8 of 96 {ENDS}", LOSING, None)
wrong("a batch in the middle is lost", "8 never", [*BATCHES[:5], *BATCHES[6:]])
wrong("each batch loses its first sample", "12 never", [batch[1:] for batch in BATCHES])
wrong("drop_last", f"the last 4 of 100 {ENDS}", load(range(100), drop_last=True), range(100))
SPLIT = load(Shares(lambda worker, of: range(worker, 90, of)), num_workers=2, drop_last=True)
wrong("drop_last in each worker", f"10 of 90 {ENDS}", SPLIT, range(90), slow=True)


def whole_shards(worker: int, of: int) -> Iterator[int]:
    """Yield a worker's share of ten shards, two of which are never read."""
    return (shard * 10 + row for shard in range(worker, 10 // of * of, of) for row in range(10))


RUN = "more samples are missing (20) than drop_last leaves out, and they form 1 contiguous run: perhaps"
for size, order, says in (
    (5, range(100), RUN),
    (6, [*range(80, 100), *range(80)], RUN),
    (7, range(100), "whole shards"),
):
    loader = load(Shares(whole_shards), num_workers=4, batch_size=size)
    wrong(f"shards for 4 workers, batches of {size}", says, loader, order, slow=True)
wrong("a shuffle buffer drops its remainder", "16 never", cut(random.Random(0).sample(NUMBERS, N)[:-16]), NUMBERS)
EXHAUSTED = "no samples arrived: the iterator is exhausted"
wrong("no batches at all", EXHAUSTED, [], None)
wrong("no batches in the second epoch", EXHAUSTED, lambda: iter(BATCHES), None, epochs=2)
USED_UP = iter(range(0))
wrong("a stream that is used up, nothing expected", EXHAUSTED, load(Shares(lambda *_: USED_UP)), None)


class InWorkers(Images):
    def __getitem__(self, number: int) -> torch.Tensor:
        return super().__getitem__(number) + (0.0 if get_worker_info() is None else torch.rand(1))


AUGMENTING = load(InWorkers(), num_workers=2, sampler=WRONG)
wrong("augmented only in workers, and a wrong sample", CHANGES, AUGMENTING, N, slow=True)
wrong("one too few, expected number given", "1 never", cut(range(N - 1)), N)

# Workers.


def share(low: int, high: int) -> Shares:
    """Give workers equal ranges of samples, but move the end of the first by ``high`` and of the others by ``low``."""

    def find(worker: int, of: int) -> range:
        return range(worker * N // of, min((worker + 1) * N // of + (high if worker == 0 else low), N))

    return Shares(find)


def shuffled(worker: int, of: int) -> list[int]:
    return random.Random(worker).sample(NUMBERS, N)[worker::of]


def by_workers(name: str, says: str, share: Any, expected: Any = NUMBERS, num_workers: int = 2, **options: Any) -> None:
    wrong(name, says, load(share, num_workers=num_workers, **options), expected, slow=True)


ALL = Shares(lambda *_: NUMBERS)
by_workers("no split by worker", "each of 2 workers delivered all 96 samples", ALL)
by_workers("no split by worker, nothing expected", "ignores get_worker_info", ALL, None, 3)
by_workers("one sample too many at the end of a worker's share", "the shares of workers overlap by 1", share(0, 1))
by_workers("one sample too few at the end of a worker's share", "1 never", share(0, -1))
by_workers("too many, persistent workers", "their shares probably overlap", share(0, 1), persistent_workers=True)
by_workers("workers shuffle with different seeds", "each shuffles with its own seed", Shares(shuffled))
ROUNDED = Shares(lambda worker, of: range(worker * (100 // of), (worker + 1) * (100 // of)))
by_workers("shares are rounded down", "each of 3 workers delivered 33 of 100 samples", ROUNDED, range(100), 3)


@case("WebDataset that resamples", "more than once")
def _(packed: Path) -> None:
    assert_exactly_once(load(web(packed, resampled=True).with_epoch(42)), list(ShardDataset(packed, fields="key")))


# Ranks.


def samplers(world_size: int, num_samples: int = N, **options: Any) -> list[Any]:
    return split(range(num_samples), world_size, **options)


BOTH = "ranks 0 and 1 delivered the same 96 samples"
wrong("no split by rank", f"{BOTH}: the loader has no DistributedSampler", (BATCHES, BATCHES), N)
wrong("no split by rank, different orders", BOTH, (numbers(shuffle=True), numbers(shuffle=True)), N)
FOR_FOUR = "size of 4, but the world size is 2"
by_command("a sampler splits for four ranks instead of two, nothing expected", FOR_FOUR, *by(samplers(4)[:2]))
OVERLAP = "the shares of ranks overlap by"
wrong("shares overlap by one", f"{OVERLAP} 1 sample: check where", (cut(range(49)), cut(range(48, N))), NUMBERS)
OWN_SEEDS = by([samplers(2)[0], samplers(2, seed=1)[1]])
SEEDS = "epoch 0 and seed 0 on rank 0; epoch 0 and seed 1 on rank 1"
wrong("each rank shuffles with its own seed", SEEDS, OWN_SEEDS)
SHUFFLED = tuple(cut(shuffled(rank, 2)) for rank in range(2))
DIFFER = "ranks repeat each other's samples and miss others"
wrong("unknown loaders shuffle with different seeds", DIFFER, SHUFFLED)
CHOICES = tuple(cut(random.Random(rank).choices(NUMBERS, k=N // 2)) for rank in range(2))
wrong("each rank samples with replacement", "sampled with replacement", CHOICES)
THIRDS = tuple(cut(range(rank * 33, (rank + 1) * 33)) for rank in range(3))
NONE_DELIVERED = "each of 3 ranks delivered 33 of 100 samples, and none delivered"
wrong("shares of ranks are rounded down", NONE_DELIVERED, THIRDS, range(100))


def in_epochs(name: str, says: str, epoch_of: Callable[[int, int], int], num_epochs: int = 2) -> None:
    """Register two ranks whose samplers are set to the epoch that ``epoch_of(epoch, rank)`` returns."""

    def ask(packed: Path) -> None:
        chosen = samplers(2)

        def set_epoch(epoch: int) -> None:
            for rank, sampler in enumerate(chosen):
                sampler.set_epoch(epoch_of(epoch, rank))

        assert_exactly_once(by(chosen), epochs=num_epochs, set_epoch=set_epoch)

    case(name, says)(ask)


BEHIND, AHEAD = (f"epoch {1 - e} and seed 0 on rank 0; epoch {e} and seed 0 on rank 1" for e in (0, 1))
in_epochs("set_epoch on one rank", BEHIND, lambda epoch, rank: epoch * (1 - rank))
in_epochs("ranks swap epochs", AHEAD, lambda epoch, rank: (epoch + rank) % 2)
in_epochs("an order repeats after another epoch", "epochs 0 and 2 have the same order", lambda epoch, _: epoch % 2, 3)
FROZEN = "epochs 0 and 1 have the same order: set_epoch"
wrong("set_epoch is never called", f"{FROZEN} is not called", by(samplers(2)), epochs=2)
BATCHED = tuple(numbers(batch_size=1, batch_sampler=BatchSampler(one, 8, False)) for one in samplers(2))
wrong("set_epoch is never called on a sampler in a BatchSampler", FROZEN, BATCHED, N, epochs=2)


class Cycling:
    def __init__(self) -> None:
        self.seeds = iter([0, 1, 0])

    def __iter__(self) -> Iterator[Any]:
        return iter(cut(random.Random(next(self.seeds)).sample(NUMBERS, N)))


class Own:
    def __init__(self, rank: int) -> None:
        self.rng, self.numbers = random.Random(rank), list(range(rank, N, 2))
        self.rng.shuffle(self.numbers)
        self.is_frozen = rank == 1

    def __iter__(self) -> Iterator[Any]:
        if not self.is_frozen:
            self.rng.shuffle(self.numbers)
        return iter(cut(self.numbers))


wrong("an unknown loader repeats an order", "epochs 0 and 2 have the same order", Cycling(), N, epochs=3)
wrong("one rank of two keeps its order", "epochs 0 and 1 have the same order on rank 1", (Own(0), Own(1)), N, epochs=2)
wrong("DistributedSampler pads", f"all repeats (3) {PADS}", by(samplers(4, N + 1)), range(N + 1))
DROPPING, QUARTERS = by(samplers(4, N + 1, drop_last=True)), "each of 4 ranks delivered 24 of 97 samples"
wrong("DistributedSampler drops samples, but all are expected", QUARTERS, DROPPING, range(N + 1))
wrong("one rank has no batches", "rank 1 delivered nothing", (EVEN, []))

# Keys.

HALVES = cut([f"{number // 2:04d}" for number in NUMBERS])


def keyed(name: str, says: str, keys: Any, expected: Any) -> None:
    wrong(name, says, [{"id": keys}], expected, key="id")


wrong("keys that classes share, expected number given", "perhaps the keys are not unique", HALVES, N)
wrong("keys that classes share", "96 never, 48 unexpected", HALVES, [f"c/{n:04d}" for n in NUMBERS])
keyed("NaN keys", "NaN cannot be the key", torch.tensor([0.0, float("nan"), float("nan")]), 3)
keyed("None keys", "None cannot be a sample's key", ["a", None, None], 3)
keyed("truth values as keys", "True cannot be a sample's key", torch.tensor([True, False]), 2)
OBJECTS = [SimpleNamespace(), SimpleNamespace()]
keyed("objects with no text representation as keys", "a SimpleNamespace cannot be the key", OBJECTS, 2)
keyed("a key that is 0.5 too high", OTHER, torch.tensor([0.0, 1.5]), [0, 1])
wrong("images as keys", "a sample's key must be one value", [[torch.rand(2, 3, 4, 4), torch.arange(2)]], 2, key=0)
KINDS = "the delivered keys and the expected keys have different types"
wrong("text keys where numbers are expected", KINDS, cut([str(number) for number in NUMBERS]))
wrong("a key that is 2^64 too high", OTHER, [[0, 5 + 2**64]], [0, 5])
wrong("the hash of a text in place of the text", OTHER, [["b"], [xxhash.xxh3_64_intdigest(b"a")]], ["a", "b"])
IMAGES = [[torch.zeros(2, 3)], [torch.zeros(2, 3)]]
WANTED = "To identify samples, pass key="
wrong("equal images in plain batches", f"samples with equal data. {WANTED}", IMAGES, None)
wrong("keys expected for images", f"no keys to compare with the expected keys. {WANTED}", IMAGES[:1], ["a", "b"])
wrong("a key that no batch has", "nothing at key='id'", IMAGES[:1], 2, key="id")


def noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(len(samples), 3)


wrong("noise in collate_fn", "differ from one pass to the next", load([torch.zeros(3)] * 8, collate_fn=noisy), None)

# Batches that violate shardio's remainder policies, with 21 samples, 2 ranks and batches of 4


def tampered(name: str, says: str, policy: str, rank: int, change: Callable[[Any], Any], *, key: Any = None) -> None:
    def ask(packed: Path) -> None:
        ranks: list[Any] = [*ours(packed, remainder=policy)]
        ranks[rank] = Tampered(ranks[rank], change)
        check_ranks(ranks, all_of(packed), key=key)

    case(name, says)(ask)


def mark_first(made: list[Any]) -> list[Any]:
    made[0][1][0] = False
    return made


def mark_all_again(made: list[Any]) -> list[Any]:
    return [*made, *((keys, torch.zeros_like(valid)) for keys, valid in made)]


def repeat_another(made: list[Any]) -> list[Any]:
    return [*made[:-1], [*made[-1][:-1], made[0][1]]]


NOT_THOSE = "not the ones that the remainder policy selects"
REPEATS = "2 more than once (2 repeats, 1 required by the remainder policy)"
MARKED = "marked as repeats, but the remainder policy marks 1"
tampered("pad: another sample is repeated", NOT_THOSE, "pad", 1, repeat_another)
tampered("pad: two repeats in place of one", REPEATS, "pad", 1, lambda made: [*made, [made[0][0]]])
tampered("keep: a rank loses its last sample", "1 never", "keep", 0, lambda made: [*made[:-1], made[-1][:-1]])
tampered("mask: every sample twice, marked the second time", MARKED, "mask", 1, mark_all_again, key=0)
tampered("mask: a sample that is not a repeat is marked", "1 never", "mask", 0, mark_first, key=0)


@case("pad: the repeat comes early, and only the number of samples is known", "1 repeat came earlier")
def _(packed: Path) -> None:
    first, second = ours(packed)
    repeated = next(iter(ours(packed)[0]))[0]

    def early(made: list[Any]) -> list[Any]:
        return [[repeated, *made[0][1:]], *made[1:-1], [*made[-1][:-1], made[0][0]]]

    check_ranks([first, Tampered(second, early)], NOTHING)


@case("drop: the wrong samples are left out", f"left out are {NOT_THOSE}")
def _(packed: Path) -> None:
    dropping = ours(packed, remainder="drop")
    tail = [key for loader in ours(packed, remainder="keep") for batch in list(loader)[2:] for key in batch]
    swap = Tampered(dropping[1], lambda made: [[tail[0], *made[0][1:]], *made[1:]])
    check_ranks([dropping[0], swap], all_of(packed))


@case("padding where each sample should come once", "use remainder='keep' or 'mask'")
def _(packed: Path) -> None:
    assert_exactly_once(tuple(ours(packed, 5)), list(ShardDataset(packed, fields="key", rank=0, world_size=1)))


def of_ours(name: str, says: str, second: Callable[[Path], Any], *, expects: bool = True) -> None:
    """Register a case of two ranks: the first is rank 0 of shardio's dataset, and the second does not match it."""
    case(name, says)(
        lambda packed: check_ranks([ours(packed)[0], second(packed)], all_of(packed) if expects else NOTHING)
    )


def ahead(packed: Path) -> Any:
    (_, loader) = ours(packed)
    loader.set_epoch(1)
    return loader


ORDERS, ELEVEN = "in different epochs or orders", "ranks 0 and 1 delivered the same 11 samples"
of_ours("shardio: a rank has a different seed", ORDERS, lambda packed: ours(packed, seed=1)[1])
of_ours("shardio: a rank is an epoch ahead", ORDERS, ahead)
of_ours("shardio: each rank believes that it is rank 0", ELEVEN, lambda packed: ours(packed)[0], expects=False)

# Recordings.


def recorded(directory: Path, rank: int, epochs: list[list[list[Any]]], world_size: int = 2) -> Path:
    with CoverageRecorder(directory, rank=rank, world_size=world_size) as recorder:
        for epoch in epochs:
            list(recorder.watch(epoch))
    return recorder.path


def recording(name: str, says: str) -> Callable[[Callable[[Path], object]], None]:
    """Register a function that writes recordings into an empty directory; the checker then judges them."""

    def register(write: Callable[[Path], object]) -> None:
        def ask(packed: Path) -> None:
            with tempfile.TemporaryDirectory() as run:
                write(Path(run))
                merge(Path(run))

        case(name, says)(ask)

    return register


recording("a rank's recording is missing", "no recording of rank 1 of 2")(lambda run: recorded(run, 0, [EVEN]))


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
    recorded(run, 0, [EVEN])
    with CoverageRecorder(run, rank=1, world_size=2) as recorder:
        watched = recorder.watch(ODD)
        next(watched)
        watched.close()  # type: ignore[attr-defined]  # it is a generator


@recording("a rank that recorded one epoch too few", "rank 1 stopped after 0 batches")
def _(run: Path) -> None:
    recorded(run, 0, [EVEN, EVEN])
    recorded(run, 1, [ODD])


@recording("a run resumes, but its loader restarts the epoch", "32 more than once")
def _(run: Path) -> None:
    recorder = CoverageRecorder(run, rank=0, world_size=1)
    states = [recorder.state_dict() for _ in recorder.watch(numbers())]
    list(CoverageRecorder(run, rank=0, world_size=1, resume=states[3]).watch(numbers()))


@recording("a run resumes on fewer ranks", "recorded with a world size of 3, but training resumes with 2")
def _(run: Path) -> None:
    state = CoverageRecorder(run, rank=0, world_size=3).state_dict()
    CoverageRecorder(run, rank=0, world_size=2, resume=state)


@recording("a run resumes, but another run has recorded since", "it is from a different run")
def _(run: Path) -> None:
    recorder = CoverageRecorder(run, rank=0, world_size=1)
    list(recorder.watch(BATCHES))
    state = recorder.state_dict()
    recorded(run, 0, [cut(range(8))], world_size=1)
    CoverageRecorder(run, rank=0, world_size=1, resume=state)


@recording("augmented images recorded by content", "differs when it is read again")
def _(run: Path) -> None:
    with CoverageRecorder(run, rank=0, world_size=1) as recorder:
        list(recorder.watch(load(Images(0.1))))
    merge(run, ExpectedSamples(num_samples=N))


# The guard.


def guarded(name: str, says: str, make: Callable[[Path], Any], *, epochs: int = 1) -> None:
    case(name, says)(lambda packed: [list(watched) for watched in [guard(make(packed))] * epochs])


def stream(packed: Path) -> Any:
    return load(Shares(lambda *_: (torch.rand(3) for _ in range(N))))


def cropped(packed: Path) -> Any:
    return ours(packed, 1, fields=("image", "label"), transform=RandomResizedCrop(8))[0]


REPEATS_3 = "batch 12 repeats 3, which batch 0 of this epoch delivered"
EITHER = "it is either a repeat or another sample with equal data"
SECOND = "change from one epoch to the next"
guarded("guard: a repeated key", REPEATS_3, lambda _: [*BATCHES, [3]])
guarded("guard: augmented images without a key", "differs when it is read again", lambda _: load(Images(0.1)))
guarded("guard: a stream that augments its samples, after its second epoch", SECOND, stream, epochs=2)
guarded("guard: equal images", EITHER, lambda _: load([torch.zeros(3)] * 4))
guarded("guard: shardio's images with a random crop", "a random transform (RandomResizedCrop)", cropped)
