"""What lies in a tar, compared with what its index says: each sample's tar header, and the hash of its content."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import SampleError, StaleIndexError
from shardio.shards.names import split_name
from shardio.shards.open_index import ShardIndex
from shardio.shards.tar import find_name, header_fits, is_header
from shardio.storage import LocalFile


def describe_place(tar: LocalFile, offset: int) -> str:
    """Return where something lies, for messages."""
    return f"{tar.path} at byte {offset}"


class Comparison:
    """Compares samples of one shard.

    Args:
        tar: The tar.
        index: Its index.
    """

    def __init__(self, tar: LocalFile, index: ShardIndex) -> None:
        self._tar, self._index = tar, index
        self._names_are_plain = True

    def compare(
        self,
        samples: NDArray[np.int64],
        fields: Sequence[str],
        columns: Sequence[Sequence[bytes | None]],
        places: NDArray[np.int64],
        starts: NDArray[np.int64],
        headers: Sequence[bytes],
        hashes: NDArray[np.uint64],
    ) -> None:
        """Compare some fields of some samples.

        Args:
            samples: int64 [n], the samples' places in the shard.
            fields: F names of fields.
            columns: F columns of n contents; None where a sample lacks the field.
            places: int64 [m], which of the samples to compare.
            starts: int64 [n, F], where the contents begin; -1 where a sample lacks the field.
            headers: The tar headers before those contents that are compared, sample by sample, without gaps.
            hashes: uint64 [n, F], the xxh3-64 that the index has.

        Raises:
            SampleError: If one was damaged after it was indexed.
            StaleIndexError: If another sample lies there.
        """
        # Plain integers and bytes from here on: this is done for every sample once.
        suffixes = [f".{field}".encode(errors="surrogateescape") for field in fields]
        keys = self._index.raw_keys(samples[places])
        header_of_next = iter(headers)
        of_samples = zip(places.tolist(), keys, starts[places].tolist(), hashes[places].tolist(), strict=True)
        for row, key, sample_starts, expected in of_samples:
            for number, start in enumerate(sample_starts):
                if start < 0:
                    continue
                header = next(header_of_next)
                content = columns[number][row]
                assert content is not None, "the index has it"
                if not header_fits(header, key, suffixes[number], len(content)):
                    self._doubt_name(row, start, key, fields[number], header)
                if (found := xxhash.xxh3_64_intdigest(content)) != expected[number]:
                    raise self._error(
                        row,
                        key,
                        start,
                        f"field {fields[number]!r} of sample {{}} is damaged: its {len(content)} bytes have xxh3-64 "
                        f"{found:016x}, expected {expected[number]:016x} as in {self._index.path}. Fetch or pack the "
                        "shard again; if the tar was changed on purpose, delete its index",
                    )

    def _error(self, row: int, raw_key: bytes, start: int, message: str) -> SampleError:
        """Return an error with a message that has a place for the sample's name."""
        key, where = _decode(raw_key), describe_place(self._tar, start)
        return SampleError(message.replace("{}", f"{key} in {where}", 1), row=row, key=key, where=where)

    def _doubt_name(self, row: int, start: int, raw_key: bytes, field: str, header: bytes) -> None:
        """Raise unless the name stands in an extended header, which some archivers write where none is needed."""
        if not self._names_are_plain:
            return
        name = find_name(self._tar.path, start)
        if name is not None and split_name(name) == (_decode(raw_key), field):
            self._names_are_plain = False
            return
        if name is None and not is_header(header):
            message = f"the tar header before field {field!r} of sample {{}} is damaged: fetch or pack the shard again"
            raise self._error(row, raw_key, start, message)
        raise StaleIndexError(
            f"field {field!r} of sample {_decode(raw_key)} is expected in {describe_place(self._tar, start)}, but the "
            f"tar holds {name or 'another member'} there: it has changed since {self._index.path} was made; delete the "
            "index to have it made again"
        )


def _decode(key: bytes) -> str:
    return key.decode(errors="surrogateescape")
