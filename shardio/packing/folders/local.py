"""Local directories that datasets are written to."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from filelock import FileLock, Timeout

from shardio.errors import FormatError, PackError
from shardio.packing.folders.folder import LOCK_NAME
from shardio.packing.folders.local_journal import JOURNAL_NAME, LocalJournal, open_journal
from shardio.packing.packed_shard import PackedShard
from shardio.shards import UNFINISHED_NAME, Shard, index_location
from shardio.storage import Location, read_pieces
from shardio.whole_writes import remove_unfinished


@dataclass(frozen=True, slots=True)
class LocalFolder:
    """A local directory: see :class:`~shardio.packing.folders.folder.DatasetFolder`.

    A lock excludes other writers. Finished shards are compared with their digests.
    """

    location: Location

    @property
    def _path(self) -> Path:
        return Path(self.location.key)

    def refuse_source(self, src: Path) -> None:
        path = self._path
        if path.exists() and not path.is_dir():
            raise PackError(f"the destination {path} is not a directory: choose another path")
        here, there = src.resolve(), path.resolve()
        if here == there or here in there.parents or there in here.parents:
            raise PackError(f"the destination {path} and the source {src} overlap: choose a separate directory")

    @contextmanager
    def locked(self, lock_name: str = LOCK_NAME) -> Iterator[None]:
        """Lock the directory for this process. If it is new and stays empty, remove it afterwards."""
        path = self._path
        existed = path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = FileLock(path / lock_name, timeout=0)
            lock.acquire()
        except Timeout as error:
            raise PackError(
                f"another process is writing to {path}: wait until it has finished, or choose another directory"
            ) from error
        except OSError as error:
            raise PackError(
                f"cannot write to the directory {path}: {error.strerror or error}. Choose another directory"
            ) from error
        try:
            yield
        finally:
            (path / lock_name).unlink(missing_ok=True)
            lock.release()
            if not existed:
                with suppress(OSError):  # It is not empty.
                    path.rmdir()

    def mark(self, content: bytes, *, replace: bool = False) -> None:
        with (self.location / UNFINISHED_NAME).write_whole() as file:  # The lock has excluded other writers.
            file.write(content)

    def list_names(self) -> list[str]:
        path = self._path
        names = [each.name for each in path.iterdir()] if path.exists() else []
        return sorted(name for name in names if not (name.startswith(".shardio-") and name.endswith(".lock")))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            (self._path / name).unlink(missing_ok=True)

    def remove_partial(self, targets: Container[str] | None = None) -> None:
        if self._path.exists():
            remove_unfinished(self._path, targets)

    def open_journal(self) -> AbstractContextManager[LocalJournal]:
        return open_journal(self._path)

    def remove_journal(self) -> None:
        (self._path / JOURNAL_NAME).unlink(missing_ok=True)

    def identify(self, tar: Location) -> str:
        """Return the xxh3-128 of the index in hexadecimal. The index has that of the tar."""
        return _digest_file(index_location(tar))

    def find_damage(self, tar: Location, shard: PackedShard) -> str | None:
        index = index_location(tar)
        try:
            if _digest_file(index) != shard.identity:
                raise FormatError(f"the content of {index.name} has changed")
            with Shard(tar, index) as opened:
                if _digest_file(tar) != opened.entry.digest:
                    raise FormatError("its content does not match its index")
        except FileNotFoundError as error:
            return f"was damaged after it was written: {error.filename} is missing"
        except FormatError as error:
            return f"was damaged after it was written: {error}"
        return None


def _digest_file(location: Location) -> str:
    digest = xxhash.xxh3_128()
    with closing(location.open()) as file:
        for piece in read_pieces(file):
            digest.update(piece)
    return digest.hexdigest()
