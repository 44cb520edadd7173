"""Write samples to numbered shards in a folder, one after another, within limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from shardio.sample import Sample
from shardio.shards import END, ShardEntry, join_name, size_in_tar
from shardio.shards.writer import TarWriter, write_index_of
from shardio.storage import Location
from shardio.values import check_integer, check_optional_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """The limits of a shard.

    Attributes:
        max_size: The maximum size in bytes. Only a shard with a single sample may exceed it.
        max_samples: The maximum number of samples; None for no limit.
    """

    max_size: int
    max_samples: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_size", check_integer("max_shard_size", self.max_size, at_least=1))
        max_samples = check_optional_integer("max_shard_samples", self.max_samples, at_least=1)
        object.__setattr__(self, "max_samples", max_samples)


def name_shard(number: int) -> str:
    """Return the name that a pack gives to a shard."""
    return f"shard-{number:06d}.tar"


class ShardSequence:
    """Writes samples to shards, and begins a new shard when one is full. One shard is open at a time.

    Shards are cut as a pack cuts them: the same samples with the same limits give the same bytes. A shard and its
    index appear whole, the index last.

    Attributes:
        entries: The finished shards.
        fields: The names of their fields.

    Args:
        folder: Where to write the shards.
        limits: The limits of each shard.
        make_name: Returns the name of the shard with a number.
    """

    def __init__(self, folder: Location, limits: ShardLimits, make_name: Callable[[int], str] = name_shard) -> None:
        self._folder, self._limits, self._make_name = folder, limits, make_name
        self.entries = list[ShardEntry]()
        self.fields = set[str]()
        self._writer: TarWriter | None = None
        self._open = ExitStack()

    @property
    def current(self) -> Location:
        """The shard that the last sample went to, or the first shard."""
        return self._folder / self._make_name(len(self.entries))

    def add(self, sample: Sample) -> None:
        """Write a sample.

        Raises:
            OSError: If it cannot be written.
        """
        if self._writer is not None and not self._has_room(self._writer, sample):
            self.end_shard()
        if self._writer is None:
            self._writer = TarWriter(self._open.enter_context(self.current.write_whole()))
        self._writer.add(sample)

    def end_shard(self) -> None:
        """Finish the current shard, if it has samples.

        Raises:
            OSError: If it cannot be written.
        """
        if self._writer is None:
            return
        tar, writer = self.current, self._writer
        writer.end()
        self._open.close()
        entry, fields = write_index_of(tar, writer)
        self.entries.append(entry)
        self.fields.update(fields)
        self._writer = None

    def discard(self, error: BaseException) -> None:
        """Remove what was written of the current shard, because of an error."""
        self._writer = None
        with suppress(OSError):  # Closing the file may fail as the write did.
            self._open.__exit__(type(error), error, error.__traceback__)

    def keys_of_current(self) -> Iterator[str]:
        """Yield the keys of the samples in the current shard."""
        return (stored.key for stored in self._writer.stored) if self._writer is not None else iter(())

    def _has_room(self, writer: TarWriter, sample: Sample) -> bool:
        size = sum(size_in_tar(join_name(sample.key, name), len(content)) for name, content in sample.fields.items())
        fits = writer.num_bytes + size + len(END) <= self._limits.max_size
        return fits and len(writer.stored) < (self._limits.max_samples or len(writer.stored) + 1)
