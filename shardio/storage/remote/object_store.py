"""Object stores and HTTP servers as a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shardio.errors import LocationError
from shardio.storage.remote.client import client
from shardio.storage.remote.messages import Create, ListFolder, ReadWhole, Remove, Stat, Walk, Write
from shardio.storage.remote.object_file import ObjectFile
from shardio.storage.remote.options import RemoteOptions
from shardio.storage.remote.urls import identify
from shardio.storage.store import FileStat
from shardio.whole_writes import naming


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStore:
    """A bucket, a container, an HTTP server or a repository. Keys have no leading slash; "" is the root.

    A pickled store carries its options, with credentials, and the folder of the storage process, so that the processes
    of a training run share one.

    Attributes:
        root: The URL of the root, such as ``s3://bucket``.
        options: The store's settings.
    """

    root: str
    options: RemoteOptions

    @property
    def prefix(self) -> str:
        return f"{self.root}/"

    @property
    def is_local(self) -> bool:
        return False

    @property
    def cache_bytes(self) -> None:
        return None

    def stat(self, key: str) -> FileStat:
        found: FileStat = client().ask(Stat(root=self.root, options=self.options, key=key))
        return found

    def open(self, key: str, *, whole: bool = False) -> ObjectFile:
        return ObjectFile(self, key, self.stat(key))

    def read_whole(self, key: str) -> bytes:
        content: bytes = client().ask(ReadWhole(root=self.root, options=self.options, key=key))
        return content

    def is_folder(self, key: str) -> bool:
        return not self._is_web_server and bool(self.list(key))

    def list(self, key: str) -> list[str]:
        self._refuse_listing(key)
        found: list[str] = client().ask(ListFolder(root=self.root, options=self.options, key=key))
        return found

    def walk(self, key: str) -> Iterator[str]:
        return (found for found, _, _ in self._walk(key))

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        for found, size, version in self._walk(key):
            yield found, FileStat(size=size, version=version, identity=identify(self.root, found, version))

    def _walk(self, key: str) -> Iterator[tuple[str, int, str]]:
        self._refuse_listing(key)
        return client().walk(Walk(root=self.root, options=self.options, key=key))

    @contextmanager
    def write_whole(self, key: str) -> Iterator[BinaryIO]:
        self._refuse_writing(key)
        with client().make_file() as file:
            with naming(file.name):  # A full disk is that of the temporary file.
                yield file
                file.flush()
            client().ask(Write(root=self.root, options=self.options, key=key, path=str(file.name)))

    def create(self, key: str, content: bytes) -> bool:
        self._refuse_writing(key)
        is_ours: bool = client().ask(Create(root=self.root, options=self.options, key=key, content=content))
        return is_ours

    def remove(self, key: str) -> None:
        self._refuse_writing(key)
        client().ask(Remove(root=self.root, options=self.options, key=key))

    def can_write(self, key: str) -> bool:
        return not (self._is_web_server or self._is_repository)

    @property
    def _is_web_server(self) -> bool:
        return self.root.startswith("http")

    @property
    def _is_repository(self) -> bool:
        return self.root.startswith("hf://")

    def _refuse_writing(self, key: str) -> None:
        if self._is_repository:
            raise LocationError(
                f"cannot write {self.prefix}{key}: shardio only reads repositories of the Hugging Face Hub. Write to a "
                "directory, and upload it (hf upload)"
            )

    def _refuse_listing(self, key: str) -> None:
        if self._is_web_server:
            raise LocationError(
                f"cannot list {self.prefix}{key}: a web server does not list its files. Name a manifest "
                "(https://…/shardio.json), or tars with a pattern (https://…/shard-{000000..000012}.tar)"
            )

    def resolve(self, key: str) -> str:
        return f"{self.root}/{key}"

    def __getstate__(self) -> tuple[str, RemoteOptions, Path | None]:
        return self.root, self.options, client().folder

    def __setstate__(self, state: tuple[str, RemoteOptions, Path | None]) -> None:
        root, options, folder = state
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "options", options)
        if folder is not None:
            client().adopt(folder)
