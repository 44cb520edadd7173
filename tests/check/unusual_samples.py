"""Unusual batches, keys and equal data that are right. If samples cannot be identified, the checker asks for keys."""

from __future__ import annotations

import random
import uuid
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.check.cases import (
    Flipped,
    Images,
    Keyed,
    N,
    Registry,
    Shares,
    cut,
    load,
    once,
)

case = Registry()
WANTED = "key="
"""The part of every message that asks for keys."""


# Batches.


@case("no batches, and none expected")
def _(packed: Path) -> None:
    once([], [])


@case("empty batches in between, batches of one, a generator")
def _(packed: Path) -> None:
    once((batch for batch in [[], *cut(range(N), 1), []]), range(N))


@case("dicts, tuples, functions of the batch")
def _(packed: Path) -> None:
    once(load(Keyed()), range(N), key="id")
    once(load([(torch.zeros(2), number) for number in range(N)]), range(N), key=1)
    once(load(Keyed()), range(N), key=lambda batch: batch["id"])


@case("namedtuples, by a field's name")
def _(packed: Path) -> None:
    pair = namedtuple("pair", ["image", "id"])
    once(load([pair(torch.zeros(2), number) for number in range(N)]), range(N), key="id")


@case("single samples, not collated")
def _(packed: Path) -> None:
    once(load(Keyed(), batch_size=None), range(N), key="id")
    once(load([f"text {number}" for number in range(N)], batch_size=None))
    once(load([(f"text {number}", number % 3) for number in range(N)], batch_size=None), key=0)


@case("batches made by the dataset")
def _(packed: Path) -> None:
    once(load(Shares(lambda worker, of: iter(cut([str(number) for number in range(N)]))), batch_size=None), N)


@case("samples in a list, not in columns")
def _(packed: Path) -> None:
    once(load(Images(), collate_fn=list), N, key=lambda batch: [int(image[0, 0, 0]) for image in batch])


@case("augmented images with keys")
def _(packed: Path) -> None:
    once(load(Keyed(0.1), shuffle=True), N, key="id", epochs=2)


@case("two crops of each image, with keys")
def _(packed: Path) -> None:
    def twofold(samples: list[Any]) -> Any:
        return torch.stack([sample["image"] for sample in samples] * 2), [sample["id"] for sample in samples]

    once(load(Keyed(0.1), collate_fn=twofold), N, key=1)


@case("bfloat16 images")
def _(packed: Path) -> None:
    once(load([torch.full((3, 2), number, dtype=torch.bfloat16) for number in range(N)]), N)


@case("a stream without length, known by content")
def _(packed: Path) -> None:
    once(load(Shares(lambda worker, of: (torch.full((2, 2), number) for number in range(N)))), N)


@case("a shuffled stream of images, nothing expected")
def _(packed: Path) -> None:
    rng = random.Random(0)
    once(load(Shares(lambda worker, of: (torch.full((2, 2), number) for number in rng.sample(range(N), N)))))


@case("pairs that were not collated, without keys", WANTED)
def _(packed: Path) -> None:
    once(load([(number, number % 3) for number in range(N)], batch_size=None), N)


@case("a stream of pairs, not collated, without keys", WANTED)
def _(packed: Path) -> None:
    once(load(Shares(lambda worker, of: ((number, number % 3) for number in range(N))), batch_size=None), N)


@case("plain tuples, without keys", WANTED)
def _(packed: Path) -> None:
    once([(number, number % 3) for number in range(N)], N)


@case("a stream that can be read only once, nothing expected", "an iterator can be read only once")
def _(packed: Path) -> None:
    numbers = iter(range(N))
    once(load(Shares(lambda worker, of: numbers)))


@case("images that can be read only once, nothing expected", "an iterator can be read only once")
def _(packed: Path) -> None:
    images = iter([torch.full((2, 2), number) for number in range(N)])
    once(load(Shares(lambda worker, of: images)))


# Equal data.


@case("equal images, with keys")
def _(packed: Path) -> None:
    once(load([{"image": torch.zeros(3), "id": number} for number in range(N)]), N, key="id")


@case("equal images, nothing expected, as often as in the dataset")
def _(packed: Path) -> None:
    once(load([torch.full((3,), number // 2) for number in range(N)], shuffle=True))


@case("equal texts, nothing expected")
def _(packed: Path) -> None:
    once(load([f"text {number // 2}" for number in range(N)], shuffle=True))


@case("equal images, the number expected", WANTED)
def _(packed: Path) -> None:
    once(load([torch.full((3,), number // 2) for number in range(N)]), N)


@case("augmented images without keys", WANTED)
def _(packed: Path) -> None:
    once(load(Flipped()), N)


@case("sequences padded to the longest of a batch, without keys", WANTED)
def _(packed: Path) -> None:
    def padded(samples: list[Any]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)

    once(load([torch.arange(number + 1) for number in range(N)], collate_fn=padded))


@case("samples in a list, without keys", WANTED)
def _(packed: Path) -> None:
    once(load(Images(), collate_fn=list), N)


@case("two crops of each image, without keys", WANTED)
def _(packed: Path) -> None:
    once(load(Images(), collate_fn=lambda samples: torch.cat([torch.stack(samples)] * 2)), N)


@case("single samples, not collated, without keys", WANTED)
def _(packed: Path) -> None:
    once(load(Images(), batch_size=None), N)


# Keys.


@case("bytes where text is expected")
def _(packed: Path) -> None:
    once([[b"a", b"b"], [b"c"]], ["a", "b", "c"])


@case("keys of two numbers")
def _(packed: Path) -> None:
    pairs = [(video, frame) for video in range(8) for frame in range(12)]
    once(load([{"id": torch.tensor(pair)} for pair in pairs]), pairs, key="id")


@case("negative and huge numbers")
def _(packed: Path) -> None:
    once([[-1, 2**64 - 1, 2**63, -(2**63), 2**64 + 5, 5]], [-1, 2**64 - 1, 2**63, -(2**63), 2**64 + 5, 5])


@case("numbers and text that read alike")
def _(packed: Path) -> None:
    once([{"id": [1, "1", 2, "2", 1.5, "1.5"]}], [1, "1", 2, "2", 1.5, "1.5"], key="id")


@case("whole numbers as floats")
def _(packed: Path) -> None:
    once(load([{"id": float(number)} for number in range(N)]), range(N), key="id")


@case("numbers of numpy and torch, one by one, and as expected keys")
def _(packed: Path) -> None:
    once(cut(list(np.arange(N))), np.int64(N))
    once(cut(list(torch.arange(N))), torch.arange(N))
    once([{"id": list(torch.arange(N))}], np.arange(N), key="id")


@case("UUIDs and paths")
def _(packed: Path) -> None:
    keys = [uuid.UUID(int=number) for number in range(20)]
    once([{"id": batch} for batch in cut(keys)], keys, key="id")
    once([{"id": [Path("a/b"), Path("a/c")]}], ["a/b", "a/c"], key="id")


@case("text in numpy arrays")
def _(packed: Path) -> None:
    once([np.array(batch) for batch in cut([f"{number}" for number in range(N)])], [f"{number}" for number in range(N)])


@case("expected as a set, unshuffled, two epochs")
def _(packed: Path) -> None:
    keys = [f"{number}" for number in range(N)]
    once(load(keys), set(keys), epochs=2)


@case("three samples, shuffled, twenty epochs")
def _(packed: Path) -> None:
    once(load(range(3), shuffle=True, batch_size=2), range(3), epochs=20)
