"""What happens to unreadable samples: an error is raised, another sample takes the row, or the batch is smaller."""

from shardio.bad_samples.policy import BadSamples, Describe, OnError, all_skipped
from shardio.bad_samples.quarantine import check_quarantine
from shardio.bad_samples.reading import Broken, Skipped, keep_samples, read_around, read_samples

__all__ = [
    "BadSamples",
    "Broken",
    "Describe",
    "OnError",
    "Skipped",
    "all_skipped",
    "check_quarantine",
    "keep_samples",
    "read_around",
    "read_samples",
]
