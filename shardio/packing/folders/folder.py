"""The folder of a dataset that is being written: what a pack needs and what stores do in different ways."""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from shardio.packing.packed_shard import PackedShard
from shardio.storage import Location

LOCK_NAME = ".shardio-pack.lock"
"""The name of the lock of a local folder."""


class Journal(Protocol):
    """Records the finished shards of an unfinished pack, each durably before the next."""

    @property
    def finished(self) -> dict[str, PackedShard]:
        """The shards that earlier runs finished, by name."""

    def add(self, shard: PackedShard) -> None:
        """Record a shard."""


class DatasetFolder(Protocol):
    """The folder of a dataset that is being written. It can be compared, hashed and pickled.

    Its files are read and written through its location. These methods do what depends on the kind of store.
    """

    @property
    def location(self) -> Location:
        """The folder's location."""

    def refuse_source(self, src: Path) -> None:
        """Raise PackError if this cannot be a folder, or if it overlaps a source."""

    def locked(self, lock_name: str = LOCK_NAME) -> AbstractContextManager[None]:
        """Create the folder, and exclude other writers during a block, as far as the store can.

        Raises:
            PackError: If the folder cannot be written, or another process is writing to it.
        """

    def mark(self, content: bytes, *, replace: bool = False) -> None:
        """Mark the dataset as unfinished.

        Args:
            content: The content of the mark, which tells writers apart.
            replace: Whether to replace the mark of another writer.

        Raises:
            PackError: If another writer has just marked it, and ``replace`` is off.
        """

    def list_names(self) -> list[str]:
        """Return the names of what the folder holds, sorted, without locks. Files may be partial."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, in any order."""

    def remove_partial(self, targets: Container[str] | None = None) -> None:
        """Remove what killed processes left of files that they had not finished.

        Args:
            targets: The names of these files; None for any.
        """

    def open_journal(self) -> AbstractContextManager[Journal]:
        """Open the journal of a pack. Create it if there is none."""

    def remove_journal(self) -> None:
        """Remove the journal if there is one."""

    def identify(self, tar: Location) -> str:
        """Return what identifies the present content of a shard and its index, for :meth:`find_damage`."""

    def find_damage(self, tar: Location, shard: PackedShard) -> str | None:
        """Return what happened to a shard that an earlier run finished; None if it is as that run left it."""
