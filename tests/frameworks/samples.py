"""Datasets and a ``collate_fn`` in their own module: workers import it faster than one that imports a framework."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from shardio import MixedDataset, ShardDataset

FIELDS: Any = ("label", "key")


class Own(Dataset[str]):
    """A user-defined dataset whose samples fill the batches of two ranks."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> str:
        return f"number {index}"


class Labeled(Dataset[tuple[int, str]]):
    """A user's map-style dataset of labels and keys."""

    keys = tuple(f"own-8/name-{index:03d}" for index in range(10))

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, self.keys[index]


def make_mixed(packed: str, **options: Any) -> MixedDataset:
    """Return a mixture whose epochs contain each sample of its sources once."""
    shards = ShardDataset(packed, fields=FIELDS, shuffle=True)
    return MixedDataset({"shards": (shards, 2), "own": (Labeled(), 1)}, stop="all-once", **options)


def collate(samples: list[tuple[int, str]]) -> dict[str, Any]:
    labels, keys = zip(*samples, strict=True)
    return {"labels": torch.tensor(labels), "numbers": torch.tensor([number_of(key) for key in keys])}


def number_of(key: str) -> int:
    """Return the number of a key such as ``class-2/name-003``. Trainer can gather only numbers from ranks."""
    return int("".join(filter(str.isdigit, key)))
