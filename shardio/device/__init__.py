"""Prefetching: copy a loader's batches to a device before they are needed."""

from shardio.device.choice import choose_device
from shardio.device.prefetcher import DevicePrefetcher

__all__ = ["DevicePrefetcher", "choose_device"]
