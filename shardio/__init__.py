"""Load training data from directories and tar shards: each sample exactly once, in a reproducible order.

Public names are loaded on first use, so ``import shardio`` is fast and does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardio import check, train, transforms
    from shardio.datasets import EpochSampler, ImageFolder, ShardDataset, ShardMapDataset
    from shardio.device import DevicePrefetcher
    from shardio.errors import (
        BusyError,
        CoverageError,
        FormatError,
        IdentityError,
        NonFiniteLossError,
        PackError,
        SampleError,
        ShardioError,
        StaleIndexError,
        StateError,
        WorkerError,
    )
    from shardio.loader import DataLoader
    from shardio.packing import pack
    from shardio.shards import Manifest

__version__ = "0.1.0"

_HOMES = {
    "BusyError": "shardio.errors",
    "CoverageError": "shardio.errors",
    "DataLoader": "shardio.loader",
    "DevicePrefetcher": "shardio.device",
    "EpochSampler": "shardio.datasets",
    "FormatError": "shardio.errors",
    "IdentityError": "shardio.errors",
    "ImageFolder": "shardio.datasets",
    "Manifest": "shardio.shards",
    "NonFiniteLossError": "shardio.errors",
    "PackError": "shardio.errors",
    "SampleError": "shardio.errors",
    "ShardDataset": "shardio.datasets",
    "ShardMapDataset": "shardio.datasets",
    "ShardioError": "shardio.errors",
    "StaleIndexError": "shardio.errors",
    "StateError": "shardio.errors",
    "WorkerError": "shardio.errors",
    "pack": "shardio.packing",
}
_SUBMODULES = ("check", "train", "transforms")

__all__ = [
    "BusyError",
    "CoverageError",
    "DataLoader",
    "DevicePrefetcher",
    "EpochSampler",
    "FormatError",
    "IdentityError",
    "ImageFolder",
    "Manifest",
    "NonFiniteLossError",
    "PackError",
    "SampleError",
    "ShardDataset",
    "ShardMapDataset",
    "ShardioError",
    "StaleIndexError",
    "StateError",
    "WorkerError",
    "__version__",
    "check",
    "pack",
    "train",
    "transforms",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _SUBMODULES:
        return import_module(f"shardio.{name}")
    if name == "HostError":
        return getattr(import_module("shardio.errors"), name)  # With a DeprecationWarning.
    raise AttributeError(f"module 'shardio' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
