"""Datasets and a sampler for torch, with shardio's order."""

from shardio.datasets.concatenated import Concatenated, why_not_concatenated
from shardio.datasets.epoch_sampler import EpochSampler, find_digest
from shardio.datasets.image_folder import ImageFolder
from shardio.datasets.indices import check_indices
from shardio.datasets.map_dataset import MapDataset
from shardio.datasets.map_epoch import known_epoch
from shardio.datasets.ordered import Ordered
from shardio.datasets.overrides import find_overridden
from shardio.datasets.samples import RaggedTensor, as_tensor, decode_samples, mark_valid
from shardio.datasets.shard_dataset import ShardDataset
from shardio.datasets.shard_map_dataset import ShardMapDataset
from shardio.datasets.stream_dataset import StreamDataset
from shardio.datasets.transformed import TOO_LATE, Transformed
from shardio.datasets.upcoming import read_ahead
from shardio.datasets.wrappers import Unwrapped, unwrap, unwrap_parts

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
