"""An open shard: a tar and its index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from shardio.errors import SampleError
from shardio.sample import Sample
from shardio.shards.index import ShardIndex
from shardio.shards.manifest import ShardEntry
from shardio.storage import LocalFile


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
        where = {field: self.index.where(sample, field) for field in fields}
        key = self.index.key(sample)
        origin = f"{self.tar.path} at byte {min((r.start for r in where.values() if r), default=0)}"
        try:
            contents = {field: self.tar.read(range_) for field, range_ in where.items() if range_}
        except (OSError, EOFError) as error:
            raise SampleError(f"sample {key} cannot be read from {origin}: {error}") from error
        return Sample(key=key, fields=contents, origin=origin)

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
