"""An open index, which locates the samples of a shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError, StaleIndexError
from shardio.shards.index import AHEAD, IndexFile, KeyColumn, decode_key
from shardio.shards.tar import BLOCK, Ints
from shardio.storage import Location, StoredFile
from shardio.values import count

MAX_KEPT = 2**20
"""The size in bytes up to which the content of an index is kept in memory. A larger index is read sample by sample."""


class TarHeaders(Protocol):
    """The interface of a tar that an index needs. Stored files and newly written tars implement it."""

    @property
    def location(self) -> Location:
        """The tar's location."""

    @property
    def size(self) -> int:
        """The tar's size in bytes."""

    def read_many(self, starts: Ints, stops: Ints) -> list[bytes]:
        """Return the contents of byte ranges: the headers of the first and the last sample's members."""


def digest_headers(tar: TarHeaders, starts: Iterable[Ints]) -> str:
    """Hash the plain tar headers of samples, which are the blocks before their contents.

    Args:
        tar: The tar.
        starts: For each sample, the offset of each field's content, int64 [F], or -1 if the sample lacks the field.

    Returns:
        xxh3-64 in hexadecimal.
    """
    found = np.concatenate([fields[fields >= BLOCK] for fields in starts] or [np.empty(0, np.int64)])
    digest = xxhash.xxh3_64()
    for header in tar.read_many(found - BLOCK, found):
        digest.update(header)
    return digest.hexdigest()


class ShardIndex:
    """An open index.

    Attributes:
        location: The location of the index.
        header: The index's metadata.
        field_indices: The place of each field in the index, by the field's name.

    Args:
        location: The location of the index.
        tar: The shard's open tar.

    Raises:
        FormatError: If the file is not an index, or is damaged.
        StaleIndexError: If the file is the index of a different tar.
    """

    def __init__(self, location: Location, tar: StoredFile) -> None:
        self.location = location
        self._tar = tar
        self._file = IndexFile(location)
        self.header = self._file.header
        self.field_indices = {field: i for i, field in enumerate(self.header.fields)}
        self._content: _Content | None = None
        try:
            self._check()
        except BaseException as error:  # Even Ctrl-C must not leave the file open.
            if isinstance(error, FormatError):
                self.discard()
            self.close()
            raise

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        return self.keys(np.array([sample]))[0]

    def keys(self, samples: Ints) -> list[str]:
        """Return the keys of samples."""
        return list(map(decode_key, self.raw_keys(samples)))

    def raw_keys(self, samples: Ints) -> list[bytes]:
        """Return the keys of samples as bytes from the tar, usually in UTF-8."""
        if self._content is None:
            return self._file.read_keys_of(samples, self._remedy)
        bounds, content = self._content.keys.bounds, self._content.keys.content
        ends = zip(bounds[samples].tolist(), bounds[samples + 1].tolist(), strict=True)
        return [content[start:stop] for start, stop in ends]

    def locate(self, samples: Ints, fields: tuple[str, ...]) -> tuple[Ints, Ints, NDArray[np.uint64]]:
        """Return the byte ranges and the hashes of fields of samples.

        Args:
            samples: int64 [n], indices in the shard.
            fields: The names of F fields.

        Returns:
            The start and the stop of each field's content in the tar, both int64 [n, F], -1 where a sample lacks the
            field; and the xxh3-64 of each field's content, uint64 [n, F].
        """
        starts, stops, hashes = self.find_entries(samples, fields).transpose(0, 2, 1)
        return starts, stops, hashes.view(np.uint64)

    def find_entries(self, samples: Ints, fields: tuple[str, ...]) -> Ints:
        """Return the results of :meth:`locate` as one array, int64 [3, F, n]."""
        columns = [self.field_indices[field] for field in fields if field in self.field_indices]
        if self._content is not None:
            found = self._content.entries[:, np.array(columns, np.int64)[:, None], samples]
        else:
            found = self._check_entries(self._file.read_entries(columns, samples))
        if len(columns) < len(fields):
            known, found = found, np.full((3, len(fields), len(samples)), -1, np.int64)
            found[:, [field in self.field_indices for field in fields]] = known
        return found

    def prefetch(self, samples: Ints, fields: tuple[str, ...]) -> None:
        """Fetch the entries and the keys of samples into the cache if the index is fetched in parts."""
        if self._file.is_fetched_in_parts:
            field_indices = [self.field_indices[field] for field in fields if field in self.field_indices]
            self._file.prefetch(np.unique(samples // AHEAD), field_indices)

    @property
    def num_bytes(self) -> int:
        """The approximate number of bytes that the index occupies in memory."""
        return 0 if self._content is None else self._content.entries.nbytes + self._content.keys.num_bytes

    def discard(self) -> bool:
        """Remove the file's bytes from the cache. Return whether another read may return different bytes."""
        return self._file.discard()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _check_entries(self, entries: Ints) -> Ints:
        """Return the start, the stop and the hash of contents, given the offset, the size and the hash, [3, F, n]."""
        offsets, sizes, hashes = entries
        present = offsets >= 0
        is_outside = (offsets < BLOCK) | (offsets > self._tar.size - sizes)
        if ((sizes < 0) == present).any() or (is_outside & present).any():
            raise FormatError(f"the index {self.location} is damaged: it points outside its tar. {self._remedy}")
        stops = offsets + sizes
        stops[~present] = -1
        return np.array([offsets, stops, hashes])

    @property
    def _remedy(self) -> str:
        return (
            f"Download the index and its tar again, or rebuild the index (shardio repair {self._tar.location.folder}; "
            "if shardio did not pack the tar, delete the index)"
        )

    def _check(self) -> None:
        """Check the first and the last samples. The other samples are checked when they are first read."""
        header = self.header
        if self._tar.size != header.num_bytes:
            raise StaleIndexError(
                f"the index {self.location} was created for a tar of {header.num_bytes} bytes, "
                f"but {self._tar.location} has changed: it now has {self._tar.size} bytes. {self._remedy}"
            )
        is_replaced = header.version is not None and header.version != self._tar.version
        # Local tars were checked when the dataset was opened. Users can replace a tar in use with an identical one.
        if is_replaced and header.compression is None and not self._tar.is_local:
            raise StaleIndexError(
                f"the index {self.location} was created for a different version of {self._tar.location}, which has "
                f"changed. Index it again (shardio index {self._tar.location.folder}). {self._remedy}"
            )
        num_key_bytes = self._file.num_key_bytes
        if not 0 <= header.num_samples <= self._tar.size // BLOCK or num_key_bytes > self._tar.size:
            raise FormatError(
                f"the index {self.location} has {count(header.num_samples, 'sample')} with keys of {num_key_bytes} "
                f"bytes, more than {self._tar.location} can hold in {self._tar.size} bytes. {self._remedy}"
            )
        if self._file.size <= MAX_KEPT:
            self._content = _Content(
                entries=self._check_entries(self._file.read_all_entries()), keys=self._file.read_all_keys(self._remedy)
            )
            self._file.close()
        first_and_last = list[Ints]()
        if header.num_samples:
            last = header.num_samples - 1
            both = np.array([0, last])
            first_and_last = list(self.locate(both, header.fields)[0])
            self.raw_keys(both)
        # For a compressed tar, the version was compared: to read the last header, all of it must be decompressed.
        if header.compression is None and not self._fits_headers(first_and_last):
            raise StaleIndexError(
                f"the index {self.location} was created for a tar with different members: {self._tar.location} has "
                f"changed. {self._remedy}"
            )

    def _fits_headers(self, starts: Sequence[Ints]) -> bool:
        """Return whether the headers before ``starts`` are those that were indexed. If they differ, read them again."""
        if digest_headers(self._tar, starts) == self.header.header_digest:
            return True
        headers = [start for each in starts for start in each.tolist() if start >= BLOCK]
        can_differ = [self._tar.discard(start - BLOCK, start) for start in headers]
        return any(can_differ) and digest_headers(self._tar, starts) == self.header.header_digest


class _Content(NamedTuple):
    """An index in memory: the start, the stop and the hash of each field's content, int64 [3, F, n], and the keys."""

    entries: Ints
    keys: KeyColumn
