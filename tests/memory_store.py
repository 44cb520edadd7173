"""A store whose objects are in memory: fuzzing reads millions of files, and no file system is as fast."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.storage import FileStat, Location


@dataclass(frozen=True, eq=False, slots=True)
class MemoryStore:
    """A store of objects in memory.

    Attributes:
        objects: The contents of the objects by key. Tests may change them.
    """

    objects: dict[str, bytes] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return "memory:"

    @property
    def is_local(self) -> bool:
        return True

    @property
    def cache_bytes(self) -> None:
        return None

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

    def is_folder(self, key: str) -> bool:
        return any(name.startswith(f"{key}/") for name in self.objects)

    def list(self, key: str) -> list[str]:
        rest = (name.removeprefix(f"{key}/") for name in self.objects if name.startswith(f"{key}/"))
        return sorted({name[: name.find("/") + 1] or name for name in rest})

    def walk_stats(self, key: str) -> Iterator[tuple[str, FileStat]]:
        return ((each, self.stat(each)) for each in self.walk(key))

    def walk(self, key: str) -> Iterator[str]:
        yield from (name for name in self.objects if name.startswith(f"{key}/"))

    @contextmanager
    def write_whole(self, key: str) -> Iterator[io.BytesIO]:
        with io.BytesIO() as content:
            yield content
            self.objects[key] = content.getvalue()

    def create(self, key: str, content: bytes) -> bool:
        return self.objects.setdefault(key, content) == content

    def remove(self, key: str) -> None:
        self.objects.pop(key, None)

    def can_write(self, key: str) -> bool:
        return True

    def resolve(self, key: str) -> str:
        return key


class MemoryFile:
    def __init__(self, location: Location, content: bytes, version: str) -> None:
        self.location, self.size, self.version = location, len(content), version
        self._content = content

    @property
    def is_local(self) -> bool:
        return True

    def read(self, start: int, stop: int) -> bytes:
        self._check(start, stop)
        return self._content[start:stop]

    def read_many(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> list[bytes]:
        return [self.read(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]

    def read_into(self, starts: Sequence[int], buffers: Sequence[memoryview]) -> None:
        for start, buffer in zip(starts, buffers, strict=True):
            self._check(start, start + len(buffer))
            buffer[:] = self._content[start : start + len(buffer)]

    def prefetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Do nothing: all is in memory."""

    def discard(self, start: int, stop: int) -> bool:
        return False

    def close(self) -> None:
        """Keep the content: other openings share it."""

    def _check(self, start: int, stop: int) -> None:
        """Raise what a local file raises."""
        if start < 0 or stop < start:
            raise OSError(f"cannot read the bytes from {start} to {stop}")
        if stop > self.size and stop > start:
            raise EOFError(f"the file ends at byte {self.size}, but bytes {start} to {stop} were requested")
