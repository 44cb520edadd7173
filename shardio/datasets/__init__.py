"""Datasets for torch: where order meets reading."""

from shardio.datasets.epoch_sampler import EpochSampler
from shardio.datasets.image_folder import ImageFolder
from shardio.datasets.shard_dataset import ShardDataset
from shardio.datasets.shard_map_dataset import ShardMapDataset

__all__ = ["EpochSampler", "ImageFolder", "ShardDataset", "ShardMapDataset"]
