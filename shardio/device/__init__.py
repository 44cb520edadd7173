"""Copy a loader's batches to a device before they are needed, and transform them there."""

from shardio.device.mixing import BatchRandomErasing, CutMix, MixUp, OneOf
from shardio.device.prefetcher import DevicePrefetcher
from shardio.device.streams import choose_device

__all__ = ["BatchRandomErasing", "CutMix", "DevicePrefetcher", "MixUp", "OneOf", "choose_device"]
