"""Datasets and a sampler for torch, with shardio's order."""

from shardio.datasets.map_datasets import ImageFolder, MapDataset, ShardMapDataset, takes_rng_keys
from shardio.datasets.mixed import MixedDataset, MixedSamples
from shardio.datasets.ordered import EpochSampler, ShardDataset, find_digest, read_ahead
from shardio.datasets.ranked import Iterated, Ordered
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
from shardio.datasets.tokens import PackedTokens
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
    "Iterated",
    "MapDataset",
    "MixedDataset",
    "MixedSamples",
    "Ordered",
    "PackedTokens",
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
    "takes_rng_keys",
    "unwrap",
    "unwrap_parts",
    "why_not_concatenated",
]
