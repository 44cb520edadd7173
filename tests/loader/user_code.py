"""Functions like those that users write. Worker processes import this module quickly, because it imports no other
test module."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from torch.utils.data import default_collate


class Pair(NamedTuple):
    """A batch as a named tuple."""

    images: torch.Tensor
    lengths: list[int]


def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
    words = (sample["txt"] or "none").split()
    tokens = np.zeros(2000, np.int64)
    tokens[: len(words)] = list(map(len, words))
    return {"image": sample["npy"], "tokens": tokens, "noise": random.random(), "key": sample["key"]}


def collate_pair(samples: list[Any]) -> Pair:
    images, labels = default_collate(samples)
    return Pair(images.float() / 255, labels.tolist())


def collate_mixed(samples: list[Any]) -> dict[str, Any]:
    images, labels = default_collate(samples)
    weight = float(np.random.beta(1, 1))  # as users do
    return {"images": weight * images + (1 - weight) * images.flip(0), "labels": [labels, labels], "weight": weight}


def collate_unusual(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    views = images.permute(0, 2, 3, 1), images[:, :1].expand(-1, 3, -1, -1), images[..., ::2], images.bfloat16()
    arrays = labels.numpy(), images.numpy(), np.array(["text"]), np.zeros((), np.float32)
    return [*views, *arrays, images, labels.to(torch.complex64), torch.nn.Parameter(images.float()), UserDict(a=labels)]


def fail(samples: Any) -> Any:
    raise KeyError("of the user")


def refuse_some(number: int) -> None:
    if number % 9 == 4:
        raise LookupError(f"number {number} is not wanted")


def transform_some(sample: dict[str, Any]) -> Any:
    refuse_some(sample["msgpack"]["id"])
    return sample["msgpack"]["id"]


def decode_some(content: bytes) -> int:
    number = int(msgpack.unpackb(content, strict_map_key=False)["id"])
    refuse_some(number)
    return number


def mean(image: Any) -> float:
    return float(image.mean())
