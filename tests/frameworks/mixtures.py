"""Mixtures for tests of frameworks, in their own module, which imports no framework."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from shardio import MixedDataset, ShardDataset, ShardMapDataset

STOP = 48
"""The number of samples in an epoch that ends in the middle of the sources' epochs, and fills the ranks' batches."""


class Own(Dataset[tuple[int, str]]):
    """A user's map-style dataset of labels and keys."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, f"own-8/name-{index:03d}"


def make_read(packed: str, **options: Any) -> MixedDataset:
    """Return a mixture that shardio's own code reads."""
    fields: dict[str, Any] = {"fields": ("label", "key")}
    shards = ShardDataset(packed, shuffle=True, **fields)
    return MixedDataset({"shards": (shards, 2), "more": (ShardMapDataset(f"{packed}-more", **fields), 1)}, **options)


def make_called(packed: str, **options: Any) -> MixedDataset:
    """Return a mixture with a source that is not shardio's."""
    shards = ShardDataset(packed, fields=("label", "key"), shuffle=True)
    return MixedDataset({"shards": (shards, 2), "own": (Own(), 1)}, **options)


MAKERS = {"read": make_read, "called": make_called}
