"""An open shard: a tar and its index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from shardio.errors import SampleError
from shardio.sample import Sample
from shardio.shards.index import ShardIndex
from shardio.shards.manifest import ShardEntry
from shardio.storage import LocalFile, read_pieces


class Shard:
    """A tar and its index, open for reading (two descriptors). A context manager closes them.

    Args:
        tar: The tar's path.
        index: Its index's path.

    Raises:
        FileNotFoundError: If the tar is not there.
        FormatError: If the index is not there, or damaged.
        StaleIndexError: If the index belongs to another tar.
    """

    def __init__(self, tar: Path, index: Path) -> None:
        self.tar = LocalFile(tar)
        try:
            self.index = ShardIndex(index, self.tar)
        except BaseException:
            self.tar.close()
            raise

    @property
    def entry(self) -> ShardEntry:
        """What a manifest says of this shard."""
        header = self.index.header
        return ShardEntry(
            name=self.tar.path.name,
            num_bytes=header.num_bytes,
            num_samples=header.num_samples,
            digest=header.digest,
        )

    def read(self, sample: int, fields: Iterable[str]) -> Sample:
        """Read those of ``fields`` that a sample has.

        Args:
            sample: The sample's place in this shard.
            fields: Names of fields.

        Raises:
            SampleError: If the tar cannot be read there.
        """
        fields = tuple(fields)
        where = {field: self.index.where(sample, field) for field in fields}
        try:
            contents = {field: self.tar.read(range_) for field, range_ in where.items() if range_}
        except (OSError, EOFError) as error:
            key, origin = self.describe(sample, fields)
            raise SampleError(f"sample {key} cannot be read from {origin}: {error}", key=key, where=origin) from error
        key, origin = self.describe(sample, fields)
        return Sample(key=key, fields=contents, origin=origin)

    def read_many(self, samples: NDArray[np.int64], fields: Sequence[str]) -> list[list[bytes | None]]:
        """Read some fields of some samples, neighbours together.

        Args:
            samples: int64 [n], the samples' places in this shard.
            fields: F names of fields.

        Returns:
            For each field the content of each sample, or None where it lacks the field.

        Raises:
            SampleError: If the tar cannot be read at one of them.
        """
        starts, stops = self.index.locate(samples, fields)  # int64 [n, F]
        present = starts >= 0
        try:
            pieces: list[bytes] = read_pieces(self.tar, starts[present], stops[present])
        except (OSError, EOFError):
            return self._read_each(samples, fields)  # To find out which it is.
        if present.all():
            return [list(pieces[number :: len(fields)]) for number in range(len(fields))]
        contents: list[bytes | None] = [None] * present.size
        for place, piece in zip(np.flatnonzero(present).tolist(), pieces, strict=True):
            contents[place] = piece
        return [contents[number :: len(fields)] for number in range(len(fields))]

    def _read_each(self, samples: NDArray[np.int64], fields: Sequence[str]) -> list[list[bytes | None]]:
        read = list[Sample]()
        try:
            for sample in samples.tolist():
                read.append(self.read(sample, fields))
        except SampleError as error:
            raise error.moved_to(len(read)) from error
        return [[sample.fields.get(field) for sample in read] for field in fields]

    def describe(self, sample: int, fields: Iterable[str]) -> tuple[str, str]:
        """Return a sample's key and where it lies, for messages."""
        where = [found for field in fields if (found := self.index.where(sample, field))]
        return self.index.key(sample), f"{self.tar.path} at byte {min((found.start for found in where), default=0)}"

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
