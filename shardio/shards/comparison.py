"""Compare a tar with its index: each sample's tar headers and the hashes of its contents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import SampleError, StaleIndexError
from shardio.shards.names import split_name
from shardio.shards.open_index import ShardIndex
from shardio.shards.tar import header_fits
from shardio.storage import StoredFile


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
        """Return an error. The sample's key and location replace ``{}`` in its message."""
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
