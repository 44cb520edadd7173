"""An open shard: a tar and its index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import SampleError, StaleIndexError
from shardio.process import let_through
from shardio.sample import Sample
from shardio.shards.index import PartCache, ShardIndex
from shardio.shards.manifest import ShardEntry
from shardio.shards.tar import BLOCK, MAX_MEMBER, TOO_LARGE, header_fits, split_name
from shardio.storage import Location, StoredFile


def describe_offset(tar: StoredFile, offset: int) -> str:
    """Return the location of a byte as text."""
    return f"{tar.location} at byte {offset}"


class Comparison:
    """Compares samples of one shard with its index.

    Args:
        tar: The tar.
        index: Its index.
    """

    def __init__(self, tar: StoredFile, index: ShardIndex) -> None:
        self._tar, self._index = tar, index
        self._names_are_plain = True

    def compare(
        self,
        samples: NDArray[np.int64],
        fields: Sequence[str],
        columns: Sequence[Sequence[bytes | None]],
        rows: NDArray[np.int64],
        starts: NDArray[np.int64],
        headers: Sequence[bytes],
        hashes: NDArray[np.uint64],
    ) -> None:
        """Compare some fields of some samples.

        Args:
            samples: int64 [n], indices in the shard.
            fields: F names of fields.
            columns: F columns of n contents; None where a sample lacks the field.
            rows: int64 [m], the rows of the samples to compare.
            starts: int64 [n, F], the offsets of the contents; -1 where a sample lacks the field.
            headers: The tar headers of the contents to compare, sample by sample. Missing fields have none.
            hashes: uint64 [n, F], the xxh3-64 of the contents according to the index.

        Raises:
            SampleError: If a sample was damaged after it was indexed.
            StaleIndexError: If the tar holds another member at the indexed offset.
        """
        # Python's integers and bytes are faster here than arrays: this runs once for every sample.
        suffixes = [f".{field}".encode(errors="surrogateescape") for field in fields]
        keys = self._index.raw_keys(samples[rows])
        header_of_next = iter(headers)
        of_samples = zip(rows.tolist(), keys, starts[rows].tolist(), hashes[rows].tolist(), strict=True)
        for row, key, sample_starts, expected in of_samples:
            for field_index, start in enumerate(sample_starts):
                if start < 0:
                    continue
                header = next(header_of_next)
                content = columns[field_index][row]
                assert content is not None, "the index has it"
                if not header_fits(header, key, suffixes[field_index], len(content)):
                    self._doubt_name(row, start, len(content), key, fields[field_index], header)
                if (found := xxhash.xxh3_64_intdigest(content)) != expected[field_index]:
                    raise self._error(
                        row,
                        key,
                        start,
                        f"field {fields[field_index]!r} of sample {{}} is damaged: its {len(content)} bytes have "
                        f"xxh3-64 {found:016x}, expected {expected[field_index]:016x} from {self._index.location}. "
                        "Download the shard again, or pack the dataset again. If shardio did not pack this tar, and it "
                        "was changed on purpose, delete its index",
                    )

    def _error(self, row: int, raw_key: bytes, start: int, message: str) -> SampleError:
        """The sample's key and location replace ``{}`` in the message."""
        key, where = _decode(raw_key), describe_offset(self._tar, start)
        return SampleError(message.replace("{}", f"{key} in {where}", 1), row=row, key=key, where=where)

    def _doubt_name(self, row: int, start: int, num_bytes: int, raw_key: bytes, field: str, header: bytes) -> None:
        """Raise an error unless the name is in an extended header, which some archivers write for every member."""
        if not self._names_are_plain:
            return
        from shardio.shards.tar_scan import find_member, is_header  # It imports tarfile, which takes 4 ms.

        member, parts = find_member(self._tar, start), (_decode(raw_key), field)
        has_name = member is not None and split_name(member[0]) == parts
        if has_name and member is not None and member[1] == num_bytes:
            self._names_are_plain = False
            return
        if member is None and not is_header(header):
            message = (
                f"the tar header before field {field!r} of sample {{}} is damaged: download the shard again, or pack "
                "the dataset again"
            )
            raise self._error(row, raw_key, start, message)
        found = "another member" if member is None else member[0]
        sizes = f" with {member[1]} bytes instead of {num_bytes}" if has_name and member is not None else ""
        raise StaleIndexError(
            f"field {field!r} of sample {_decode(raw_key)} is expected in {describe_offset(self._tar, start)}, but the "
            f"tar holds {found} there{sizes}: it has changed since {self._index.location} was created. "
            "Download the shard and its index again, or pack the dataset again. If shardio did not pack this tar, "
            "delete the index instead"
        )


def _decode(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


class Shard:
    """A tar and its index, open for reading. A context manager closes them.

    Args:
        tar: The location of the tar.
        index: The location of its index.
        parts: A cache for the parts of the index that are read; by default, a new one.

    Raises:
        FileNotFoundError: If the tar does not exist.
        FormatError: If the index does not exist or is damaged.
        StaleIndexError: If the index belongs to another tar.
    """

    def __init__(self, tar: Location, index: Location, parts: PartCache | None = None) -> None:
        self.tar = tar.open()
        try:
            self.index = ShardIndex(index, self.tar, parts)
        except BaseException:  # Ctrl-C must not leave the tar open either.
            self.tar.close()
            raise
        self._comparison = Comparison(self.tar, self.index)

    @property
    def entry(self) -> ShardEntry:
        """The shard's entry in a manifest."""
        header = self.index.header
        return ShardEntry(
            name=self.tar.location.name,
            num_bytes=header.num_bytes,
            num_samples=header.num_samples,
            digest=header.digest,
        )

    def read(self, sample: int, fields: Iterable[str]) -> Sample:
        """Read a sample, with those of ``fields`` that it has.

        Args:
            sample: The sample's index in this shard.
            fields: Names of fields.

        Raises:
            SampleError: If the sample cannot be read.
        """
        fields = tuple(fields)
        columns = self.read_many(np.array([sample]), fields)
        key, origin = self.describe(sample, fields)
        contents = {field: column[0] for field, column in zip(fields, columns, strict=True)}
        there = {field: content for field, content in contents.items() if content is not None}
        return Sample(key=key, fields=there, origin=origin)

    def read_many(
        self, samples: NDArray[np.int64], fields: Sequence[str], unseen: NDArray[np.bool_] | None = None
    ) -> list[list[bytes | None]]:
        """Read some fields of some samples. Neighbouring ranges are read together.

        Args:
            samples: int64 [n], indices in this shard.
            fields: F names of fields.
            unseen: bool [n], the samples whose tar headers and contents are compared with the index; None for none.

        Returns:
            For each field, the content of each sample, or None if the sample lacks the field.

        Raises:
            SampleError: If a sample cannot be read or is damaged, or a field is too large.
            StaleIndexError: If the tar holds another member at the indexed offset.
        """
        there = tuple(field for field in fields if field in self.index.field_indices)
        starts, stops, hashes = self.index.locate(samples, there)  # each [n, F]
        if (stops - starts > MAX_MEMBER).any():
            self._raise_too_large(samples, there, starts, stops)
        present = starts >= 0
        range_starts, range_stops = starts[present], stops[present]
        if unseen is not None:  # Most tar headers are next to a small content, so both are read together.
            compared = present & unseen[:, None]
            range_starts = np.concatenate([range_starts, starts[compared] - BLOCK])
            range_stops = np.concatenate([range_stops, starts[compared]])
        try:
            found = self.tar.read_many(range_starts, range_stops)
        except (OSError, EOFError) as error:
            let_through(error)
            self._let_store_errors_through(error)
            self._raise_unreadable(samples, there, starts, stops)
            found = self.tar.read_many(range_starts, range_stops)  # All samples can be read now.
        num_contents = np.count_nonzero(present)
        contents, headers = found[:num_contents], found[num_contents:]
        if present.all():
            columns = [list[bytes | None](contents[i :: len(there)]) for i in range(len(there))]
        else:
            cells: list[bytes | None] = [None] * present.size
            for i, content in zip(np.flatnonzero(present).tolist(), contents, strict=True):
                cells[i] = content
            columns = [cells[i :: len(there)] for i in range(len(there))]
        if unseen is not None:
            self._comparison.compare(samples, there, columns, np.flatnonzero(unseen), starts, headers, hashes)
        by_field = dict(zip(there, columns, strict=True))
        return [by_field[field] if field in by_field else [None] * len(samples) for field in fields]

    def describe(self, sample: int, fields: Iterable[str]) -> tuple[str, str]:
        """Return a sample's key, and its location as text."""
        starts, _, _ = self.index.locate(np.array([sample]), tuple(fields))
        found = starts[starts >= 0]
        return self.index.key(sample), describe_offset(self.tar, int(found.min()) if len(found) else 0)

    def _let_store_errors_through(self, error: OSError | EOFError) -> None:
        """Re-raise an error that no sample causes, such as a failing store or a cache that cannot be written."""
        if not self.tar.is_local and not isinstance(error, FileNotFoundError | EOFError):
            raise error

    def discard(self, sample: int, fields: Sequence[str]) -> bool:
        """Remove a damaged sample from the cache. Return whether another read may give other bytes."""
        starts, stops, _ = self.index.locate(np.array([sample]), tuple(fields))
        found = False
        for start, stop in zip(starts[starts >= 0].tolist(), stops[starts >= 0].tolist(), strict=True):
            found |= self.tar.discard(start - BLOCK, stop)
        return found

    def _raise_too_large(
        self,
        samples: NDArray[np.int64],
        fields: Sequence[str],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
    ) -> None:
        row, field_index = np.argwhere(stops - starts > MAX_MEMBER)[0].tolist()
        key, origin = self.describe(int(samples[row]), (fields[field_index],))
        num_bytes = int(stops[row, field_index] - starts[row, field_index])
        message = f"field {fields[field_index]!r} of sample {key} in {origin} has {num_bytes} bytes, {TOO_LARGE}"
        raise SampleError(message, row=row, key=key, where=origin)

    def _raise_unreadable(
        self,
        samples: NDArray[np.int64],
        fields: Sequence[str],
        starts: NDArray[np.int64],
        stops: NDArray[np.int64],
    ) -> None:
        for row, field_index in np.argwhere(starts >= 0).tolist():
            try:
                self.tar.read(int(starts[row, field_index]) - BLOCK, int(stops[row, field_index]))
            except (OSError, EOFError) as error:  # noqa: PERF203  # Only the first bad sample ends the loop.
                let_through(error)
                self._let_store_errors_through(error)
                key, origin = self.describe(int(samples[row]), fields)
                message = f"sample {key} cannot be read from {origin}: {error}"
                raise SampleError(message, row=row, key=key, where=origin) from error

    def close(self) -> None:
        """Close both files."""
        self.index.close()
        self.tar.close()

    def __enter__(self) -> Shard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
