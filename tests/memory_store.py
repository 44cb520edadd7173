"""A store that keeps its objects in memory: fuzzing reads millions of files, and file systems are slower."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import xxhash

from shardio.storage import FileStat, Location, Store, StoredFile
from shardio.storage.store import ends_early


@dataclass(frozen=True, slots=True)
class MemoryStore(Store):
    """A store of objects in memory.

    Attributes:
        objects: The contents of the objects by key; tests may change them.
    """

    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return "memory:"

    @property
    def is_local(self) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def at(self, key: str) -> Location:
        return Location(store=self, key=key)

    def stat(self, key: str) -> FileStat:
        content = self.read_whole(key)
        return FileStat(size=len(content), version=xxhash.xxh3_64_hexdigest(content), identity=key)

    def open(self, key: str, *, whole: bool = False) -> MemoryFile:
        return MemoryFile(self.at(key), self.read_whole(key), self.stat(key).version)

    def read_whole(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise FileNotFoundError(key) from None

    def list(self, key: str) -> list[str]:
        rest = (name.removeprefix(f"{key}/") for name in self.objects if name.startswith(f"{key}/"))
        return sorted({name[: name.find("/") + 1] or name for name in rest})

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        names = [name for name in self.objects if name.startswith(f"{key}/") and "/." not in name[len(key) :]]
        return ((name, self.stat(name)) for name in names)

    @contextmanager
    def write_whole(self, key: str) -> Iterator[io.BytesIO]:
        with io.BytesIO() as content:
            yield content
            self.objects[key] = content.getvalue()

    def create(self, key: str, content: bytes) -> bool:
        return self.objects.setdefault(key, content) == content

    def remove(self, key: str) -> None:
        self.objects.pop(key, None)


class MemoryFile(StoredFile):
    def __init__(self, location: Location, content: bytes, version: str) -> None:
        self.location, self.size, self.version = location, len(content), version
        self._content = content

    def read(self, start: int, stop: int) -> bytes:
        if start < 0 or stop < start:  # A local file raises the same error.
            raise OSError(f"cannot read the bytes from {start} to {stop}")
        if stop > self.size and stop > start:
            raise ends_early(self.location, self.size, start, stop)
        return self._content[start:stop]
