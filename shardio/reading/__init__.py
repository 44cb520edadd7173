"""From samples' numbers to their bytes."""

from shardio.reading.reader import SampleReader

__all__ = ["SampleReader"]
