"""Which samples were compared with the index: a bit for each sample of the shards that were read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardio.storage import LocalFile

Verify = Literal["first", "off"]
"""When samples are compared with the index: where they are first read, or never."""


class Seen:
    """The samples that were seen, a bit each, for any number of threads.

    A thread may undo what another one notes at the same moment: a sample is then compared once more.

    Args:
        shard_sizes: int64 [shards], the samples of each shard.
    """

    def __init__(self, shard_sizes: NDArray[np.int64]) -> None:
        self._shard_sizes = shard_sizes
        self._seen: dict[tuple[int, tuple[str, ...]], _SeenOfShard] = {}

    def of_shard(self, shard: int, fields: Sequence[str], tar: LocalFile) -> _SeenOfShard:
        """Return the samples of a shard of which some fields were seen.

        Args:
            shard: Its number.
            fields: Names of fields.
            tar: The shard as it is open now. If it is another file than before, or has changed, none were seen.
        """
        name, stamp = (shard, tuple(fields)), (tar.size, tar.mtime_ns, tar.inode)
        seen = self._seen.get(name)
        if seen is None or seen.stamp != stamp:
            seen = self._seen[name] = _SeenOfShard(int(self._shard_sizes[shard]), stamp)
        return seen


class _SeenOfShard:
    __slots__ = ("_bits", "_num_unseen", "stamp")

    def __init__(self, num_samples: int, stamp: tuple[int, int, int]) -> None:
        self.stamp = stamp
        self._bits = np.packbits(np.arange(-num_samples % 8 + num_samples) >= num_samples, bitorder="little")
        self._num_unseen = num_samples  # At least about: threads count at the same time.

    def find_unseen(self, samples: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return which samples were not seen, bool [n]; None if all of them were."""
        bits = self._bits  # Read once: another thread may drop them meanwhile.
        if not len(bits):
            return None
        unseen: NDArray[np.bool_] = (bits[samples >> 3] & _bits_of(samples)) == 0
        return unseen if unseen.any() else None

    def add(self, samples: NDArray[np.int64]) -> None:
        """Note that samples were seen."""
        bits = self._bits
        if not len(bits):
            return
        np.bitwise_or.at(bits, samples >> 3, _bits_of(samples))
        self._num_unseen -= len(samples)
        if self._num_unseen <= 0:
            self._num_unseen = int(np.unpackbits(~bits).sum())
            if self._num_unseen == 0:
                self._bits = bits[:0]  # All were seen: the bits need not be kept.


def _bits_of(samples: NDArray[np.int64]) -> NDArray[np.uint8]:
    return np.left_shift(np.uint8(1), (samples & 7).astype(np.uint8))
