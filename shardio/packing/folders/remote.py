"""Folders in object stores that datasets are written to.

Object stores have no locks, renames or appends. The mark of an unfinished dataset is created only if there is none, so
of two writers that begin at the same time, one is refused. Each shard of a pack is recorded in an object of its own.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import PackError
from shardio.json_text import parse_json
from shardio.packing.folders.folder import LOCK_NAME
from shardio.packing.packed_shard import PackedShard
from shardio.shards import UNFINISHED_NAME, index_location
from shardio.storage import Location

RECORD_PREFIX = ".shardio-packed-"
"""The start of the names of the objects that record finished shards."""

MAX_REQUESTS = 16
"""How many small objects are read or removed at a time."""


class RemoteJournal:
    """Records finished shards, each in an object: see :class:`~shardio.packing.folders.folder.Journal`.

    Damaged records count as missing: their shards are packed again.

    Args:
        folder: The folder of the dataset.
        names: The names of the records that are there.
    """

    def __init__(self, folder: Location, names: Sequence[str]) -> None:
        self._folder = folder
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            found = pool.map(_read_record, [folder / name for name in names])
            self.finished = {shard.entry.name: shard for shard in found if shard is not None}

    def add(self, shard: PackedShard) -> None:
        with (self._folder / f"{RECORD_PREFIX}{shard.entry.name}.json").write_whole() as file:
            file.write(json.dumps(shard.dump()).encode())


@dataclass(frozen=True, slots=True)
class RemoteFolder:
    """A folder in an object store: see :class:`~shardio.packing.folders.folder.DatasetFolder`.

    Finished shards are recognised by the versions that the store gave to them and to their indexes, because an object's
    content was compared when it was uploaded.
    """

    location: Location

    def refuse_source(self, src: Path) -> None:
        """Refuse a server that is read-only. The source is local, so it does not overlap."""
        self._refuse_read_only()

    @contextmanager
    def locked(self, lock_name: str = LOCK_NAME) -> Iterator[None]:
        """Refuse a server that is read-only. Other writers are excluded by the mark alone."""
        self._refuse_read_only()
        yield

    def mark(self, content: bytes, *, replace: bool = False) -> None:
        mark = self.location / UNFINISHED_NAME
        if replace:
            with mark.write_whole() as file:
                file.write(content)
        elif not mark.create(content):
            raise PackError(
                f"another program has just begun to write to {self.location}: wait until it has finished, or choose "
                "another destination"
            )

    def list_names(self) -> list[str]:
        return self.location.list()

    def remove(self, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            for _ in pool.map(Location.remove, [self.location / name for name in names]):
                pass

    def remove_partial(self, targets: Container[str] | None = None) -> None:
        """Do nothing: objects appear whole."""

    @contextmanager
    def open_journal(self) -> Iterator[RemoteJournal]:
        yield RemoteJournal(self.location, self._list_records())

    def remove_journal(self) -> None:
        self.remove(self._list_records())

    def identify(self, tar: Location) -> str:
        """Return the versions of both objects."""
        return f"{tar.stat().version} {index_location(tar).stat().version}"

    def find_damage(self, tar: Location, shard: PackedShard) -> str | None:
        try:
            is_same = self.identify(tar) == shard.identity
        except FileNotFoundError as error:
            return f"was damaged after it was written: {error.strerror or error}"
        return None if is_same else "or its index was replaced after it was written"

    def _refuse_read_only(self) -> None:
        if not self.location.can_write():
            raise PackError(
                f"cannot write to {self.location}: HTTP servers and the Hugging Face Hub are read-only for shardio. "
                "Choose a directory or an object store (s3://, gs://, az://)"
            )

    def _list_records(self) -> list[str]:
        return [name for name in self.list_names() if name.startswith(RECORD_PREFIX)]


def _read_record(location: Location) -> PackedShard | None:
    try:
        return PackedShard.load(parse_json(location.read_whole()))
    except (ValueError, TypeError, KeyError):
        return None
