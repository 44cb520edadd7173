"""Track which samples were compared with the index file, with one bit per sample of each shard that was read.

Samples of remote shards are compared each time, because their bytes may be fetched again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardio.storage import StoredFile

Verify = Literal["first", "off"]
"""When samples are compared with the index file: when they are first read, or never."""


class Seen:
    """The samples seen so far, that is, compared with the index file. Threads can share it.

    If two threads record samples at the same moment, one record may be lost. Those samples are then compared again.

    Args:
        shard_sizes: int64 [shards], the number of samples in each shard.
    """

    def __init__(self, shard_sizes: NDArray[np.int64]) -> None:
        self._shard_sizes = shard_sizes
        self._seen: dict[tuple[int, tuple[str, ...]], _SeenOfShard] = {}

    def of_shard(self, shard: int, fields: Sequence[str], tar: StoredFile) -> _SeenOfShard:
        """Return the record of the samples of a shard that were seen with these fields.

        Args:
            shard: The shard's place in the manifest.
            fields: The names of the fields that are read.
            tar: The shard's open tar. If its version has changed, the record starts empty.
        """
        name = shard, tuple(fields)
        seen = self._seen.get(name)
        if seen is None or seen.version != tar.version:
            seen = self._seen[name] = _SeenOfShard(int(self._shard_sizes[shard]), tar.version, is_kept=tar.is_local)
        return seen


class _SeenOfShard:
    __slots__ = ("_bits", "_is_kept", "_num_unseen", "version")

    def __init__(self, num_samples: int, version: str, *, is_kept: bool = True) -> None:
        self.version, self._is_kept = version, is_kept
        self._bits = np.packbits(np.arange(-num_samples % 8 + num_samples) >= num_samples, bitorder="little")
        self._num_unseen = num_samples  # Approximate: threads update it concurrently.

    def find_unseen(self, samples: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return which samples were not seen, bool [n], or None if all were seen."""
        bits = self._bits  # Read once: another thread may drop them.
        if not len(bits):
            return None
        unseen: NDArray[np.bool_] = (bits[samples >> 3] & _bits_of(samples)) == 0
        return unseen if unseen.any() else None

    def add(self, samples: NDArray[np.int64]) -> None:
        """Record that samples were seen."""
        bits = self._bits
        if not len(bits) or not self._is_kept:
            return
        np.bitwise_or.at(bits, samples >> 3, _bits_of(samples))
        self._num_unseen -= len(samples)
        if self._num_unseen <= 0:
            self._num_unseen = int(np.unpackbits(~bits).sum())
            if self._num_unseen == 0:
                self._bits = bits[:0]  # All were seen: the bits are no longer needed.


def _bits_of(samples: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (samples & 7).astype(np.uint8))
