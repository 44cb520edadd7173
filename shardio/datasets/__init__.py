"""Datasets and a sampler for torch, with shardio's order."""

from shardio.datasets.map_datasets import ImageFolder, MapDataset, ShardMapDataset
from shardio.datasets.ordered import EpochSampler, ShardDataset, find_digest, read_ahead
from shardio.datasets.ranked import Ordered
from shardio.datasets.samples import (
    TOO_LATE,
    RaggedTensor,
    Transformed,
    as_tensor,
    check_indices,
    decode_samples,
    known_epoch,
    mark_valid,
)
from shardio.datasets.stream_dataset import StreamDataset
from shardio.datasets.wrappers import (
    Concatenated,
    Unwrapped,
    find_overridden,
    unwrap,
    unwrap_parts,
    why_not_concatenated,
)

__all__ = [
    "TOO_LATE",
    "Concatenated",
    "EpochSampler",
    "ImageFolder",
    "MapDataset",
    "Ordered",
    "RaggedTensor",
    "ShardDataset",
    "ShardMapDataset",
    "StreamDataset",
    "Transformed",
    "Unwrapped",
    "as_tensor",
    "check_indices",
    "decode_samples",
    "find_digest",
    "find_overridden",
    "known_epoch",
    "mark_valid",
    "read_ahead",
    "unwrap",
    "unwrap_parts",
    "why_not_concatenated",
]
