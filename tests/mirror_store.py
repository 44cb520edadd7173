"""A store of local files. As with any custom backend, shardio treats it as neither local nor an object store.

The store's URLs contain local paths: ``mirror:///data/train``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from shardio.storage import FileStat, Location, RemoteAccess, Store, StoredFile
from shardio.storage.local import LocalFile, LocalStore
from shardio.storage.store import Writer

FILES = LocalStore()


def open_url(url: str, access: RemoteAccess) -> Location:
    """Return the location that a URL names."""
    return Location(store=MirrorStore(), key=url.removeprefix("mirror://"))


@dataclass(frozen=True, slots=True)
class MirrorStore(Store):
    """The local file system as a store without a cache and without a storage process. Keys are absolute paths."""

    @property
    def prefix(self) -> str:
        return "mirror://"

    def stat(self, key: str) -> FileStat:
        return FILES.stat(key)

    def open(self, key: str, *, whole: bool = False) -> StoredFile:
        return LocalFile(Location(store=self, key=key))

    def list(self, key: str) -> list[str]:
        return FILES.list(key)

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        return FILES.walk_stats(key)

    def write_whole(self, key: str) -> AbstractContextManager[Writer]:
        return FILES.write_whole(key)

    def create(self, key: str, content: bytes) -> bool:
        return FILES.create(key, content)

    def remove(self, key: str) -> None:
        FILES.remove(key)
