"""Prefetching: copy a loader's batches to a device before they are needed, and transform them there."""

from shardio.device.choice import choose_device
from shardio.device.erasing import BatchRandomErasing
from shardio.device.mixing import CutMix, MixUp, OneOf
from shardio.device.prefetcher import DevicePrefetcher

__all__ = ["BatchRandomErasing", "CutMix", "DevicePrefetcher", "MixUp", "OneOf", "choose_device"]
