"""Copy a loader's batches to a device."""

from shardio.device.prefetcher import DevicePrefetcher

__all__ = ["DevicePrefetcher"]
