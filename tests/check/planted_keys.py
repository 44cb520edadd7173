"""Faults of keys, and loaders that break their remainder policy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash

from shardio.check import ExpectedSamples
from tests.check.cases import (
    N,
    Registry,
    Tampered,
    all_of,
    check_ranks,
    cut,
    once,
    ours,
)

case = Registry()
KEYS = [f"class-{number % 2}/{number:04d}" for number in range(N)]


# Keys.


@case("keys that classes share, only the number expected", "perhaps the keys are not unique")
def _(packed: Path) -> None:
    once(cut([f"{number // 2:04d}" for number in range(N)]), N)


@case("keys that classes share, full keys expected", "96 never, 48 unexpected")
def _(packed: Path) -> None:
    once(cut([f"{number // 2:04d}" for number in range(N)]), KEYS)


@case("NaN keys", "NaN cannot be the key")
def _(packed: Path) -> None:
    once([{"id": torch.tensor([0.0, float("nan"), float("nan")])}], 3, key="id")


@case("None keys", "None cannot be a sample's key")
def _(packed: Path) -> None:
    once([{"id": ["a", None, None]}], 3, key="id")


@case("truth values as keys", "True cannot be a sample's key")
def _(packed: Path) -> None:
    once([{"id": torch.tensor([True, False])}], 2, key="id")


@case("objects without a text as keys", "a SimpleNamespace cannot be the key")
def _(packed: Path) -> None:
    once([{"id": [SimpleNamespace(), SimpleNamespace()]}], 2, key="id")


@case("images as keys", "a key must be one value per sample")
def _(packed: Path) -> None:
    once([[torch.rand(2, 3, 4, 4), torch.arange(2)]], 2, key=0)


@case("text keys where numbers are expected", "the delivered keys and the expected keys have different types")
def _(packed: Path) -> None:
    once(cut([str(number) for number in range(N)]), range(N))


@case("-1 in place of 2^64 - 1", "1 never, 1 unexpected")
def _(packed: Path) -> None:
    once([[0, -1]], [0, 2**64 - 1])


@case("a key that is 2^64 too high", "1 never, 1 unexpected")
def _(packed: Path) -> None:
    once([[0, 5 + 2**64]], [0, 5])


@case("the hash of a text in place of the text", "1 never, 1 unexpected")
def _(packed: Path) -> None:
    once([["b"], [xxhash.xxh3_64_intdigest(b"a")]], ["a", "b"])


@case("a key that is half a number too high", "1 never, 1 unexpected")
def _(packed: Path) -> None:
    once([{"id": torch.tensor([0.0, 1.5])}], [0, 1], key="id")


# shardio's remainder policies, not kept to. 21 samples, 2 ranks, batches of 4.


@case("pad: another sample is repeated", "not the ones that the remainder policy selects")
def _(packed: Path) -> None:
    first, second = ours(packed)
    check_ranks([first, Tampered(second, lambda made: [*made[:-1], [*made[-1][:-1], made[0][1]]])], all_of(packed))


@case("pad: the repeat comes early, only the number known", "1 repeat came earlier")
def _(packed: Path) -> None:
    first, second = ours(packed)
    repeated = next(iter(ours(packed)[0]))[0]

    def early(made: list[Any]) -> list[Any]:
        return [[repeated, *made[0][1:]], *made[1:-1], [*made[-1][:-1], made[0][0]]]

    check_ranks([first, Tampered(second, early)], ExpectedSamples())


@case("pad: two repeats in place of one", "2 more than once (2 repeats, 1 required by the remainder policy)")
def _(packed: Path) -> None:
    first, second = ours(packed)
    check_ranks([first, Tampered(second, lambda made: [*made, [made[0][0]]])], all_of(packed))


@case("drop: other samples are left out", "left out are not the ones that the remainder policy selects")
def _(packed: Path) -> None:
    kept = ours(packed, remainder="keep")
    dropping = ours(packed, remainder="drop")
    tail = [key for loader in kept for batch in list(loader)[2:] for key in batch]
    swap = Tampered(dropping[1], lambda made: [[tail[0], *made[0][1:]], *made[1:]])
    check_ranks([dropping[0], swap], all_of(packed))


@case("keep: a rank loses its last sample", "1 never")
def _(packed: Path) -> None:
    first, second = ours(packed, remainder="keep")
    check_ranks([Tampered(first, lambda made: [*made[:-1], made[-1][:-1]]), second], all_of(packed))


@case("mask: every sample twice, marked the second time", "marked as repeats, but the remainder policy marks 1")
def _(packed: Path) -> None:
    first, second = ours(packed, remainder="mask")
    marked = Tampered(second, lambda made: [*made, *[(keys, torch.zeros_like(valid)) for keys, valid in made]])
    check_ranks([first, marked], all_of(packed), key=0)


@case("mask: a sample is marked that is not a repeat", "1 never")
def _(packed: Path) -> None:
    def mark(made: list[Any]) -> list[Any]:
        made[0][1][0] = False
        return made

    first, second = ours(packed, remainder="mask")
    check_ranks([Tampered(first, mark), second], all_of(packed), key=0)


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
    check_ranks([ours(packed)[0], ours(packed)[0]], ExpectedSamples())
