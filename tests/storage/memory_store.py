"""A store in memory: as little like a file system as an object store is. It shows what callers may rely on."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.storage import FileStat, Location, ReplacedError

_OBJECTS = defaultdict[str, dict[str, bytes]](dict)
"""The objects of each store by its name. A store is a frozen value, and cannot hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStore:
    """Objects in this process's memory."""

    name: str

    @property
    def prefix(self) -> str:
        return f"memory://{self.name}/"

    @property
    def objects(self) -> dict[str, bytes]:
        return _OBJECTS[self.name]

    def stat(self, key: str) -> FileStat:
        content = self.read_whole(key)
        return FileStat(size=len(content), version=xxhash.xxh3_64_hexdigest(content), identity=key)

    def open(self, key: str) -> MemoryFile:
        return MemoryFile(Location(store=self, key=key))

    def read_whole(self, key: str) -> bytes:
        if key not in self.objects:
            raise FileNotFoundError(f"there is no object {self.prefix}{key}")
        return self.objects[key]

    def is_folder(self, key: str) -> bool:
        return any(other.startswith(f"{key}/") for other in self.objects)

    def list(self, key: str) -> list[str]:
        below = [other.removeprefix(f"{key}/") for other in self.objects if other.startswith(f"{key}/")]
        return sorted({head + slash for head, slash, _ in (name.partition("/") for name in below)})

    def walk(self, key: str) -> Iterator[str]:
        below = [other for other in list_keys(self.objects) if other.startswith(f"{key}/")]
        return (other for other in below if "/." not in other.removeprefix(key))

    @contextmanager
    def write_whole(self, key: str) -> Iterator[io.BytesIO]:
        content = io.BytesIO()
        yield content
        self.objects[key] = content.getvalue()

    def remove(self, key: str) -> None:
        self.objects.pop(key, None)

    def can_write(self, key: str) -> bool:
        return True

    def resolve(self, key: str) -> str:
        return f"{self.prefix}{key}"


class MemoryFile:
    """An open object, which may change as objects in object stores do."""

    def __init__(self, location: Location) -> None:
        found = location.stat()
        self.location, self.size, self.version = location, found.size, found.version

    def read(self, start: int, stop: int) -> bytes:
        if self.location.stat().version != self.version:
            raise ReplacedError(f"{self.location} changed after it was opened")
        if stop > max(start, self.size):
            raise EOFError(f"{self.location} ends at byte {self.size}, but bytes {start} to {stop} were requested")
        return self.location.read_whole()[start:stop]

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        return [self.read(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for start, buffer in zip(starts, buffers, strict=True):
            buffer[:] = self.read(start, start + len(buffer))

    def close(self) -> None:
        pass


def list_keys(objects: dict[str, bytes]) -> list[str]:
    """Return the keys of a store; apart from the class, whose ``list`` is a method."""
    return list(objects)
