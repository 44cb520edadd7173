"""What happens to samples that cannot be read: an error, another sample in their row, or a smaller batch."""

from shardio.bad_samples.policy import BadSamples, Describe, OnError, all_skipped
from shardio.bad_samples.quarantine import check_quarantine
from shardio.bad_samples.reading import Broken, Skipped, read_around

__all__ = [
    "BadSamples",
    "Broken",
    "Describe",
    "OnError",
    "Skipped",
    "all_skipped",
    "check_quarantine",
    "read_around",
]
