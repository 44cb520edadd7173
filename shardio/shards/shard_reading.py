"""Read samples from several shards at once, and record which samples have been compared with their index files.

A batch often has a few samples from each of many shards. All steps but the reads themselves handle all shards together.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.files import HEAD_BYTES, Descriptor, FileRange
from shardio.process import let_through
from shardio.shards.shard import Shard
from shardio.shards.tar import BLOCK, MAX_MEMBER, Ints, header_fits
from shardio.shared import SharedNumbers
from shardio.storage import LIMITS

FEW = 16
"""The largest number of ranges that are joined with Python's integers, because arrays are slower for so few ranges."""


def read_shards(
    visits: Sequence[tuple[Shard, Ints]],
    fields: Sequence[str],
    unseen: NDArray[np.bool_] | None = None,
    deferred: Container[str] = (),
) -> list[list[Any]]:
    """Read fields of samples from one or more shards. Read neighboring ranges of a tar together.

    Args:
        visits: Each shard, and its samples' indices in the shard, int64. There are n samples in all.
        fields: The names of F fields.
        unseen: bool [n], whether to compare each sample's tar headers and contents with the index, or None to compare
            no sample.
        deferred: The fields to read later, if they need not be compared.

    Returns:
        For each field, the content of each sample, a FileRange from which it is read later, or None if the sample
        lacks the field.

    Raises:
        SampleError: If a sample cannot be read or is damaged, or a field is too large.
        StaleIndexError: If a tar has a different member at the indexed offset.
    """
    request = _Request(visits, tuple(fields))
    request.refuse_too_large()
    files, is_late = request.find_late(unseen, deferred)
    ends = request.stops
    if any(files):
        ends = np.where(is_late, np.minimum(ends, request.starts + HEAD_BYTES), ends)
    columns = request.read(ends, unseen)
    if any(files):
        request.defer(columns, is_late, files)
    return [columns[column] for column in request.by_place.argsort().tolist()]


class _Request:
    """Fields of samples from some shards, to be read together.

    Attributes:
        fields: The names of F fields, in the order in which the first sample's fields are stored.
        by_place: int64 [F], the indices of these fields among the requested fields.
        bounds: The row of the first sample of each shard, and the number of samples n.
        starts, stops: int64 [F, n], the range of each field's content in its tar, or -1 if the sample lacks the field.
        hashes: uint64 [F, n], the xxh3-64 of each field's content according to the index.
    """

    def __init__(self, visits: Sequence[tuple[Shard, Ints]], fields: tuple[str, ...]) -> None:
        self._visits = visits
        self.bounds = [0, *accumulate(len(samples) for _, samples in visits)]
        cells = [shard.index.find_entries(samples, fields) for shard, samples in visits]
        together = (
            cells[0] if len(cells) == 1 else np.concatenate(cells or [np.empty((3, len(fields), 0), int)], axis=2)
        )
        self.by_place = together[0, :, 0].argsort(kind="stable") if self.bounds[-1] else np.arange(len(fields))
        self.fields = tuple(fields[column] for column in self.by_place.tolist())
        self.starts, self.stops, hashes = together[:, self.by_place]
        self.hashes = hashes.view(np.uint64)

    def refuse_too_large(self) -> None:
        """Raise SampleError if a field is too large."""
        sizes = self.stops - self.starts
        if sizes.max(initial=0) > MAX_MEMBER:
            row, column = np.argwhere(sizes.T > MAX_MEMBER)[0].tolist()
            shard, sample = self._find_sample(row)
            shard.raise_too_large(sample, row, self.fields[column], int(sizes[column, row]))

    def find_late(
        self, unseen: NDArray[np.bool_] | None, deferred: Container[str]
    ) -> tuple[list[Descriptor | None], NDArray[np.bool_]]:
        """Return the shards' local files, and whether to read each field's content from them later, bool [F, n]."""
        files: list[Descriptor | None] = [None] * len(self._visits)
        are_deferred = [field in deferred for field in self.fields]
        is_late = (self.stops > self.starts) & np.array(are_deferred, np.bool_)[:, None]
        if unseen is not None:
            is_late &= ~unseen
        if any(are_deferred) and is_late.any():
            for visit, ((shard, _), start, stop) in enumerate(self._parts()):
                if is_late[:, start:stop].any() and (file := shard.tar.hold()) is not None:
                    files[visit] = file
                else:
                    is_late[:, start:stop] = False
        return files, is_late

    def read(self, ends: Ints, unseen: NDArray[np.bool_] | None) -> list[list[Any]]:
        """Return the columns of contents, each read up to its end, and compare unseen samples with the index."""
        present, num_fields = self.starts >= 0, len(self.fields)
        if not num_fields:
            return []
        if unseen is None and present.all():
            bounds = [num_fields * bound for bound in self.bounds]
            contents = self._read_ranges(self.starts.T.ravel(), ends.T.ravel(), bounds)
            return [contents[column::num_fields] for column in range(num_fields)]
        # Each field has two ranges, its header's and its content's, in the order in which they are stored: [n, F, 2].
        # Most headers precede a small file, and are read with it.
        wanted = np.zeros((*present.T.shape, 2), np.bool_)
        wanted[..., 1] = present.T
        if unseen is not None:
            wanted[..., 0] = present.T & unseen[:, None]
        starts = np.stack([self.starts - BLOCK, self.starts], axis=-1).transpose(1, 0, 2)[wanted]
        stops = np.stack([self.starts, ends], axis=-1).transpose(1, 0, 2)[wanted]
        num_before = np.append(0, wanted.sum(axis=(1, 2)).cumsum())
        pieces: list[Any] = self._read_ranges(starts, stops, num_before[self.bounds].tolist())
        pieces.append(None)  # A sample that lacks a field has the place -1.
        places = np.where(wanted, (wanted.cumsum() - 1).reshape(wanted.shape), -1)
        columns = [[pieces[place] for place in places[:, column, 1].tolist()] for column in range(num_fields)]
        if unseen is not None:
            self._compare(pieces, places[..., 0], columns)
        return columns

    def defer(self, columns: list[list[Any]], is_late: NDArray[np.bool_], files: Sequence[Descriptor | None]) -> None:
        """Replace the first bytes of contents with ranges to read later, where ``is_late``, bool [F, n], is True."""
        for column, row in np.argwhere(is_late).tolist():
            file = files[bisect_right(self.bounds, row) - 1]
            assert file is not None, "only local files are held"
            start, stop = int(self.starts[column, row]), int(self.stops[column, row])
            columns[column][row] = FileRange(file, start, stop, columns[column][row], int(self.hashes[column, row]))

    def _parts(self) -> Iterator[tuple[tuple[Shard, Ints], int, int]]:
        """Yield each shard and its samples, and the rows where they start and stop."""
        return zip(self._visits, self.bounds[:-1], self.bounds[1:], strict=True)

    def _find_sample(self, row: int) -> tuple[Shard, int]:
        """Return the shard of the sample in a row, and the sample's index in the shard."""
        visit = bisect_right(self.bounds, row) - 1
        shard, samples = self._visits[visit]
        return shard, int(samples[row - self.bounds[visit]])

    def _read_ranges(self, starts: Ints, stops: Ints, bounds: Sequence[int]) -> list[bytes]:
        """Return the contents of ranges. Join small neighbors.

        Args:
            starts: int64 [m], the first byte of each range, in the order of the samples.
            stops: int64 [m], the byte after each range's last byte.
            bounds: The place of each shard's first range, and m.
        """
        if len(starts) <= FEW:
            found = list[bytes]()
            for visit, (start, stop) in enumerate(pairwise(bounds)):
                if start < stop:
                    tar = self._visits[visit][0].tar
                    found += self._try(visit, tar.read_many, starts[start:stop], stops[start:stop])
            return found
        is_first = np.zeros(len(starts) + 1, np.bool_)
        is_first[bounds] = True
        if ((starts[1:] < starts[:-1]) & ~is_first[1:-1]).any():  # Fields or samples are not in stored order.
            order = np.lexsort((starts, is_first[:-1].cumsum()))
            contents = [b""] * len(order)
            ordered = self._read_ranges(starts[order], stops[order], bounds)
            for place, content in zip(order.tolist(), ordered, strict=True):
                contents[place] = content
            return contents
        is_small = stops - starts <= LIMITS.max_small
        is_first[1:-1] |= ~(is_small[1:] & is_small[:-1] & (starts[1:] - stops[:-1] <= LIMITS.max_gap))
        # Cut long runs at multiples of ``max_run`` from their starts.
        runs_begin = starts[np.maximum.accumulate(np.where(is_first[:-1], np.arange(len(starts)), 0))]
        cuts = (starts - runs_begin) // LIMITS.max_run
        is_first[1:-1] |= cuts[1:] != cuts[:-1]
        firsts = np.flatnonzero(is_first[:-1])
        begins = starts[firsts]
        run_begins, run_ends = begins.tolist(), np.maximum.reduceat(stops, firsts).tolist()
        run_bounds = firsts.searchsorted(bounds).tolist()
        runs = list[bytes]()
        for visit, (start, stop) in enumerate(pairwise(run_bounds)):
            if start < stop:
                tar = self._visits[visit][0].tar
                runs += self._try(visit, tar.read_apart, run_begins[start:stop], run_ends[start:stop])
        if len(runs) == len(starts):
            return runs
        run_of_range = is_first[:-1].cumsum() - 1
        offsets = begins[run_of_range]
        parts = zip(run_of_range.tolist(), (starts - offsets).tolist(), (stops - offsets).tolist(), strict=True)
        return [runs[run][start:stop] for run, start, stop in parts]

    def _try(self, visit: int, read: Callable[[Any, Any], list[bytes]], starts: Any, stops: Any) -> list[bytes]:
        """Read ranges of a shard's tar. If that fails, raise SampleError for the first sample that cannot be read."""
        try:
            return read(starts, stops)
        except (OSError, EOFError) as error:
            shard, samples = self._visits[visit]
            let_through(error)
            shard.let_store_errors_through(error)
            shard.find_unreadable(samples, self.fields, self.bounds[visit])
            return read(starts, stops)  # Each sample was readable on its own, so read all of them together again.

    def _compare(self, pieces: Sequence[Any], headers: Ints, columns: Sequence[Sequence[Any]]) -> None:
        """Compare contents with the index, given the place of each header in ``pieces``, int64 [n, F], or -1."""
        keys = [key for shard, samples in self._visits for key in shard.index.raw_keys(samples)]
        suffixes = [f".{field}".encode(errors="surrogateescape") for field in self.fields]
        digest = xxhash.xxh3_64_intdigest
        rows = zip(keys, headers.tolist(), zip(*columns, strict=True), self.hashes.T.tolist(), strict=True)
        for row, (key, places, contents, hashes) in enumerate(rows):
            for column, (place, content, expected) in enumerate(zip(places, contents, hashes, strict=True)):
                if place < 0:
                    continue
                header = pieces[place]
                if not header_fits(header, key, suffixes[column], len(content)) or digest(content) != expected:
                    shard, _ = self._find_sample(row)
                    start = int(self.starts[column, row])
                    shard.compare(row, start, key, self.fields[column], header, content, expected)


class SeenSamples:
    """A record of the samples of a shard that have been *seen*, that is, compared with the index file.

    Threads and processes can share a record. If two additions to a record happen at the same moment, one may be lost.
    The samples in the lost addition are then compared again.

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
        if num_samples % 8:  # The last bits belong to no sample.
            bits[-1] |= 256 - (1 << num_samples % 8)
        self._bits = bits
        self._num_unseen = num_samples  # Approximate, because threads update this number concurrently.

    @property
    def is_complete(self) -> bool:
        """Whether all samples have been seen."""
        return not len(self._bits)

    def read(self, places: Ints) -> NDArray[np.uint8] | int:
        """Return the bytes at ``places`` in the array of bits, uint8 [n], or 255 if all samples have been seen."""
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
    """Samples of one or more shards that are read together, and a mask of those that have not been seen.

    Args:
        records: The record of each shard.
        samples: The samples' indices in each shard, int64.

    Attributes:
        mask: bool [n], true for samples that have not been seen; None if all samples have been seen.
    """

    def __init__(self, records: Sequence[SeenSamples], samples: Sequence[Ints]) -> None:
        self.mask: NDArray[np.bool_] | None = None
        if all(record.is_complete for record in records):
            return
        self._records = records
        self._bounds = [0, *accumulate(map(len, samples))]
        together = samples[0] if len(samples) == 1 else np.concatenate(samples)
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
                own = start + np.flatnonzero(self.mask[start:stop])
                record.add(self._places[own], self._masks[own])

    def _parts(self) -> Iterator[tuple[SeenSamples, int, int]]:
        return zip(self._records, self._bounds[:-1], self._bounds[1:], strict=True)


class SeenShards:
    """The records of a dataset's shards.

    Processes forked from this one share the records, so each sample is compared in only one of them. A process that
    reads different fields than the first process does, or a different version of the tar, has a record of its own.

    Args:
        shard_sizes: The number of samples in each shard.
    """

    def __init__(self, shard_sizes: Sequence[int] | Ints) -> None:
        self._sizes = np.asarray(shard_sizes, np.int64)
        self._stops = np.cumsum(-(-self._sizes // 8))
        # Unused pages of an anonymous mapping need no memory.
        self._bits = np.frombuffer(mmap.mmap(-1, int(self._stops[-1:].sum()) or 1), np.uint8)
        # For each shard, a hash of the fields and the version to which its bits belong, or 0.
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
        """Return the shared bits if they belong to these fields and this version, or were unused; otherwise None."""
        own = xxhash.xxh3_64_intdigest(repr((fields, version)).encode()) | 1
        with self._lock.locked():
            if self._owners[shard] == 0:
                self._owners[shard] = own
            if self._owners[shard] != own:
                return None
        stop = int(self._stops[shard])
        return self._bits[stop - -(-int(self._sizes[shard]) // 8) : stop]
