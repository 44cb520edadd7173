"""Load training data from directories and tar shards: each sample exactly once, in a reproducible order.

Public names are loaded on first use, so ``import shardio`` is fast and does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardio.lazy import import_on_use

if TYPE_CHECKING:
    from shardio import check, train, transforms
    from shardio.datasets import EpochSampler, ImageFolder, ShardDataset, ShardMapDataset, StreamDataset
    from shardio.decoding import verify
    from shardio.device import BatchRandomErasing, CutMix, DevicePrefetcher, MixUp, OneOf
    from shardio.errors import (
        BusyError,
        CoverageError,
        FormatError,
        IdentityError,
        LocationError,
        NonFiniteLossError,
        PackError,
        SampleError,
        ShardioError,
        StaleIndexError,
        StateError,
        StoreError,
        WorkerError,
    )
    from shardio.loader import DataLoader
    from shardio.packing import ShardWriter, append, finalize, merge, pack, reshard, split
    from shardio.reading.keyed import KeyedShards, open  # noqa: A004  # As in tarfile and PIL.Image.
    from shardio.shards import Manifest, Problem
    from shardio.shared_list import SharedList
    from shardio.world import WorkerInfo, get_worker_info

__version__ = "0.1.0"

_SUBMODULES = ("check", "train", "transforms")

__all__ = [
    "BatchRandomErasing",
    "BusyError",
    "CoverageError",
    "CutMix",
    "DataLoader",
    "DevicePrefetcher",
    "EpochSampler",
    "FormatError",
    "IdentityError",
    "ImageFolder",
    "KeyedShards",
    "LocationError",
    "Manifest",
    "MixUp",
    "NonFiniteLossError",
    "OneOf",
    "PackError",
    "Problem",
    "SampleError",
    "ShardDataset",
    "ShardMapDataset",
    "ShardWriter",
    "ShardioError",
    "SharedList",
    "StaleIndexError",
    "StateError",
    "StoreError",
    "StreamDataset",
    "WorkerError",
    "WorkerInfo",
    "__version__",
    "append",
    "check",
    "finalize",
    "get_worker_info",
    "merge",
    "open",
    "pack",
    "reshard",
    "split",
    "train",
    "transforms",
    "verify",
]


_get = import_on_use(
    __name__,
    {
        ".datasets": "EpochSampler ImageFolder ShardDataset ShardMapDataset StreamDataset",
        ".decoding": "verify",
        ".device": "CutMix DevicePrefetcher MixUp OneOf BatchRandomErasing",
        ".errors": "BusyError CoverageError FormatError IdentityError LocationError NonFiniteLossError "
        "PackError SampleError ShardioError StaleIndexError StateError StoreError WorkerError",
        ".loader": "DataLoader",
        ".packing": "ShardWriter append finalize merge pack reshard split",
        ".reading.keyed": "KeyedShards open",
        ".shards": "Manifest Problem",
        ".shared_list": "SharedList",
        ".world": "WorkerInfo get_worker_info",
    },
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"shardio.{name}")
    if name == "HostError":
        return getattr(import_module("shardio.errors"), name)  # With a DeprecationWarning, each time.
    return _get(name)


def __dir__() -> list[str]:
    return sorted(__all__)
