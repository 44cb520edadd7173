"""Record which samples have been compared with the index file."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.shards import Ints
from shardio.shared import SharedNumbers


class SeenSamples:
    """A record of the samples of a shard that have been *seen*, that is, compared with the index file.

    Threads and processes can share a record. If two of them add samples at the same moment, one addition may be lost.
    The lost samples are then compared again.

    Args:
        num_samples: The number of samples in the shard.
        version: The version of the tar.
        is_kept: Whether to record seen samples.
        bits: uint8 [(num_samples + 7) // 8], the bits of the seen samples; by default, no sample has been seen.
    """

    __slots__ = ("_bits", "_is_kept", "_num_unseen", "version")

    def __init__(
        self, num_samples: int, version: str, *, is_kept: bool = True, bits: NDArray[np.uint8] | None = None
    ) -> None:
        self.version, self._is_kept = version, is_kept
        if bits is None:
            bits = np.zeros(-(-num_samples // 8), np.uint8)
        if num_samples % 8:  # There are no samples for the last bits.
            bits[-1] |= 256 - (1 << num_samples % 8)
        self._bits = bits
        self._num_unseen = num_samples  # Approximate, because threads update this number concurrently.

    @property
    def is_complete(self) -> bool:
        """Whether all samples have been seen."""
        return not len(self._bits)

    def read(self, places: Ints) -> NDArray[np.uint8] | int:
        """Return the bytes of the bits at ``places``, uint8 [n], or 255 if all samples have been seen."""
        bits = self._bits  # Read the attribute once: another thread may drop the bits.
        return bits[places] if len(bits) else 255

    def add(self, places: Ints, masks: NDArray[np.uint8]) -> None:
        """Record samples as seen, given the byte of each sample and its bit in the byte."""
        bits = self._bits
        if not len(bits) or not self._is_kept:
            return
        np.bitwise_or.at(bits, places, masks)
        self._num_unseen -= len(places)
        if self._num_unseen <= 0:
            self._num_unseen = int(np.unpackbits(~bits).sum())
            if self._num_unseen == 0:
                self._bits = bits[:0]  # All samples have been seen, so the bits are not needed.


class Unseen:
    """Samples of one or more shards that are read together, and which of them have not been seen.

    Args:
        records: The record of each shard.
        samples: The samples' indices in each shard, int64.

    Attributes:
        mask: Whether each sample has not been seen, bool [n], or None if all samples have been seen.
    """

    def __init__(self, records: Sequence[SeenSamples], samples: Sequence[Ints]) -> None:
        self.mask: NDArray[np.bool_] | None = None
        if all(record.is_complete for record in records):
            return
        self._records = records
        self._bounds = [0, *accumulate(map(len, samples))]
        together = np.concatenate(samples)
        self._places, self._masks = together >> 3, np.left_shift(np.uint8(1), (together & 7).astype(np.uint8))
        bits = np.empty(len(together), np.uint8)
        for record, start, stop in self._parts():
            bits[start:stop] = record.read(self._places[start:stop])
        mask = (bits & self._masks) == 0
        if mask.any():
            self.mask = mask

    def mark_seen(self) -> None:
        """Record the samples as seen."""
        if self.mask is not None:
            for record, start, stop in self._parts():
                record.add(self._places[start:stop], self._masks[start:stop])

    def _parts(self) -> Iterator[tuple[SeenSamples, int, int]]:
        return zip(self._records, self._bounds[:-1], self._bounds[1:], strict=True)


class SeenShards:
    """The records of a dataset's shards.

    Processes forked from this one share the records, so each sample is compared in only one of them. A process that
    reads different fields from the first process, or a different version of the tar, has a record of its own.

    Args:
        shard_sizes: The number of samples in each shard.
    """

    def __init__(self, shard_sizes: Sequence[int] | Ints) -> None:
        self._sizes = np.asarray(shard_sizes, np.int64)
        self._stops = np.cumsum(-(-self._sizes // 8))
        # Unused pages of an anonymous mapping need no memory.
        self._bits = np.frombuffer(mmap.mmap(-1, int(self._stops[-1:].sum()) or 1), np.uint8)
        # A hash of the fields and the version that each shard's bits are for, or 0.
        self._owners = np.frombuffer(mmap.mmap(-1, 8 * len(self._sizes) or 1), np.uint64, len(self._sizes))
        self._lock = SharedNumbers([0])
        self._records: dict[tuple[int, tuple[str, ...]], SeenSamples] = {}

    def find(self, shard: int, fields: tuple[str, ...], version: str, *, is_kept: bool) -> SeenSamples:
        """Return a shard's record.

        Args:
            shard: The shard's place in the manifest.
            fields: The fields that are compared.
            version: The version of the tar.
            is_kept: Whether to record seen samples.
        """
        record = self._records.get((shard, fields))
        if record is None or record.version != version:
            bits = self._find_bits(shard, fields, version) if is_kept else None
            num_samples = int(self._sizes[shard])
            record = self._records[shard, fields] = SeenSamples(num_samples, version, is_kept=is_kept, bits=bits)
        return record

    def _find_bits(self, shard: int, fields: tuple[str, ...], version: str) -> NDArray[np.uint8] | None:
        """Return the shared bits, if they are for these fields and this version, or not used yet."""
        own = xxhash.xxh3_64_intdigest(repr((fields, version)).encode()) | 1
        with self._lock.locked():
            if self._owners[shard] == 0:
                self._owners[shard] = own
            if self._owners[shard] != own:
                return None
        stop = int(self._stops[shard])
        return self._bits[stop - -(-int(self._sizes[shard]) // 8) : stop]
