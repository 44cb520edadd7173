"""Prefetching: copy a loader's batches to a device before they are needed, and transform them there."""

from shardio.device.choice import choose_device
from shardio.device.erasing import RandomErasing
from shardio.device.mixing import CutMix, MixUp, OneOf
from shardio.device.prefetcher import DevicePrefetcher

__all__ = ["CutMix", "DevicePrefetcher", "MixUp", "OneOf", "RandomErasing", "choose_device"]
