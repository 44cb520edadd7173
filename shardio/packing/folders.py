"""Manage the folder of an unfinished dataset, in a local directory or an object store.

Object stores have no locks, renames or appends. A writer creates the mark of an unfinished dataset only if the
folder has no mark: if two writers start at the same time, one of them gets an error. A pack records each finished shard
in a separate object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from shardio.errors import FormatError, PackError
from shardio.files import find_target, naming, remove_unfinished
from shardio.packing.pack_call import REJECTED_NAME
from shardio.packing.preparing import PackedShard
from shardio.shards import (
    MANIFEST_NAME,
    PACKED_NAME,
    UNFINISHED_NAME,
    Manifest,
    Shard,
    index_location,
    read_manifest,
    write_manifest,
)
from shardio.storage import Location, find_path, parse_location, read_pieces
from shardio.values import parse_json

LOCK_NAME = ".shardio-pack.lock"
"""The name of the lock file in a local folder."""

JOURNAL_NAME = ".shardio-pack.journal"

RECORD_PREFIX = ".shardio-packed-"
"""The prefix of the names of the objects that record finished shards."""

MAX_REQUESTS = 16
"""The maximum number of small objects that are read or removed at a time."""

MARK = b"written by a program"
"""The prefix of the mark of a dataset that a program writes. A pack's mark is different, so packing does not resume
such a dataset."""

_OTHER_NAMES = {MANIFEST_NAME, REJECTED_NAME}


class Journal(Protocol):
    """A record of the finished shards of an unfinished pack."""

    @property
    def finished(self) -> dict[str, PackedShard]:
        """The shards that earlier runs finished, by name."""

    def add(self, shard: PackedShard) -> None:
        """Record a shard. The record is durable after this method returns."""


class DatasetFolder(Protocol):
    """The folder of a dataset that is being written. Folders can be compared, hashed and pickled.

    The files are read and written through the folder's location. The methods hide the differences between stores.
    """

    @property
    def location(self) -> Location:
        """The folder's location."""

    def refuse_source(self, src: Path) -> None:
        """Raise PackError if the folder cannot be written to, or overlaps the source."""

    def locked(self, lock_name: str = LOCK_NAME) -> AbstractContextManager[None]:
        """Create the folder, and exclude other writers during the block, as far as the store allows.

        Raises:
            PackError: If the folder cannot be written to, or another process is writing to it.
        """

    def mark(self, content: bytes, *, replace: bool = False) -> None:
        """Mark the dataset as unfinished.

        Args:
            content: The content of the mark, which identifies the writer.
            replace: Whether to replace the mark of another writer.

        Raises:
            PackError: If another writer has just marked the dataset, and ``replace`` is False.
        """

    def list_names(self) -> list[str]:
        """Return the sorted names of the files in the folder, except lock files. Some files may be partial."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, in any order."""

    def remove_partial(self, targets: Container[str] | None = None) -> None:
        """Remove partial files that killed processes left behind.

        Args:
            targets: The final names of the files to remove, or None for all.
        """

    def open_journal(self) -> AbstractContextManager[Journal]:
        """Open the journal of a pack, or create it if it does not exist."""

    def remove_journal(self) -> None:
        """Remove the journal if it exists."""

    def identify(self, tar: Location) -> str:
        """Return an identifier of the current content of a shard and its index, for :meth:`find_damage`."""

    def find_damage(self, tar: Location, shard: PackedShard) -> str | None:
        """Describe the damage to a shard that an earlier run finished, or return None if the shard is unchanged."""


class _LocalJournal:
    """A journal file with a line for each shard.

    A killed run may leave an incomplete last line. Damaged lines are treated as missing: their shards are packed again.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        content = parse_location(path).read_whole()
        self.finished = _find_shards(content.splitlines())
        if content and not content.endswith(b"\n"):
            self._append(b"\n")

    def add(self, shard: PackedShard) -> None:
        self._append(json.dumps(shard.dump()).encode() + b"\n")

    def _append(self, content: bytes) -> None:
        with naming(self._path):
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)


@dataclass(frozen=True, slots=True)
class _LocalFolder:
    """A local directory: see :class:`~shardio.packing.folders.DatasetFolder`.

    A lock excludes other writers. Digests show whether finished shards are unchanged.
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
        """Lock the directory for this process. Remove the directory afterward if it is new and still empty."""
        from filelock import FileLock, Timeout  # Worker processes do not lock folders.

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
                with suppress(OSError):  # The directory is not empty.
                    path.rmdir()

    def mark(self, content: bytes, *, replace: bool = False) -> None:
        with (self.location / UNFINISHED_NAME).write_whole() as file:  # The lock excludes other writers.
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

    @contextmanager
    def open_journal(self) -> Iterator[_LocalJournal]:
        path = self._path / JOURNAL_NAME
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            yield _LocalJournal(path, descriptor)
        finally:
            os.close(descriptor)

    def remove_journal(self) -> None:
        (self._path / JOURNAL_NAME).unlink(missing_ok=True)

    def identify(self, tar: Location) -> str:
        """Return the xxh3-128 of the index in hexadecimal. The index contains the tar's digest."""
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


class _RemoteJournal:
    """A journal with an object for each shard. Shards whose records are damaged are packed again."""

    def __init__(self, folder: Location, names: Sequence[str]) -> None:
        self._folder = folder
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            self.finished = _find_shards(pool.map(Location.read_whole, [folder / name for name in names]))

    def add(self, shard: PackedShard) -> None:
        with (self._folder / f"{RECORD_PREFIX}{shard.entry.name}.json").write_whole() as file:
            file.write(json.dumps(shard.dump()).encode())


@dataclass(frozen=True, slots=True)
class _RemoteFolder:
    """A folder in an object store: see :class:`~shardio.packing.folders.DatasetFolder`.

    Finished shards are recognized by the store's versions of their tars and indexes. The content of each shard was
    verified when the shard was uploaded.
    """

    location: Location

    def refuse_source(self, src: Path) -> None:
        """Refuse a read-only store. A local source cannot overlap a folder in a store."""
        self._refuse_read_only()

    @contextmanager
    def locked(self, lock_name: str = LOCK_NAME) -> Iterator[None]:
        """Reject a read-only store. Only the mark excludes other writers."""
        self._refuse_read_only()
        yield

    def mark(self, content: bytes, *, replace: bool = False) -> None:
        mark = self.location / UNFINISHED_NAME
        if replace:
            with mark.write_whole() as file:
                file.write(content)
        elif not mark.create(content):
            raise PackError(
                f"another program has just started writing to {self.location}: wait until it has finished, or choose "
                "another destination"
            )

    def list_names(self) -> list[str]:
        return self.location.list()

    def remove(self, names: Sequence[str]) -> None:
        with ThreadPoolExecutor(MAX_REQUESTS) as pool:
            for _ in pool.map(Location.remove, [self.location / name for name in names]):
                pass

    def remove_partial(self, targets: Container[str] | None = None) -> None:
        """Do nothing, because a store never holds partial objects."""

    @contextmanager
    def open_journal(self) -> Iterator[_RemoteJournal]:
        yield _RemoteJournal(self.location, self._list_records())

    def remove_journal(self) -> None:
        self.remove(self._list_records())

    def identify(self, tar: Location) -> str:
        """Return the versions of the tar and its index."""
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
                f"cannot write to {self.location}: {self.location.store.prefix} is read-only for shardio. Choose a "
                "directory or an object store (s3://, gs://, az://)"
            )

    def _list_records(self) -> list[str]:
        return [name for name in self.list_names() if name.startswith(RECORD_PREFIX)]


def _find_shards(records: Iterable[bytes]) -> dict[str, PackedShard]:
    """Return the shards that records describe, by name. Damaged records are skipped."""
    found = dict[str, PackedShard]()
    for record in records:
        with suppress(ValueError, TypeError, KeyError):
            shard = PackedShard.load(parse_json(record))
            found[shard.entry.name] = shard
    return found


def choose_folder(location: Location) -> DatasetFolder:
    """Return the folder at a location."""
    return _RemoteFolder(location) if find_path(location) is None else _LocalFolder(location)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedDataset:
    """A dataset that this program is writing.

    Attributes:
        folder: The dataset's folder.
        mark: The content of the mark in the folder. A mark with different content belongs to another writer.
    """

    folder: DatasetFolder
    mark: bytes


def check_destination(src: Path, folder: DatasetFolder) -> None:
    """Reject a destination that overlaps the source or contains anything other than an unfinished pack.

    Raises:
        PackError: If the destination cannot be used.
    """
    folder.refuse_source(src)
    names = folder.list_names()
    is_unfinished = UNFINISHED_NAME in names
    if MANIFEST_NAME in names and not is_unfinished:
        raise PackError(
            f"{folder.location} already holds a packed dataset: choose another destination or delete it first"
        )
    # A killed run may not have finished writing the mark.
    names = [name for name in names if find_target(name) != UNFINISHED_NAME]
    if names and not is_unfinished:
        raise PackError(
            f"the destination {folder.location} is not empty (it holds {names[0]}): choose an empty directory"
        )


@contextmanager
def locked(src: Path, folder: DatasetFolder) -> Iterator[None]:
    """Create the destination, lock it for this process, and check it again.

    Another pack may have finished since the first check.

    Raises:
        PackError: If the destination cannot be created or written to, if another process is writing to it, or if it has
            become unusable.
    """
    try:
        with folder.locked():
            check_destination(src, folder)
            yield
    except OSError as error:
        raise PackError(
            f"packing into {folder.location} failed: {error}. Fix the cause (if the disk is full, free some space) and "
            "rerun the same command to resume: finished shards are kept"
        ) from error


@contextmanager
def begun(folder: DatasetFolder, digest: str, names: Collection[str]) -> Iterator[UnfinishedDataset]:
    """Prepare the destination to start or resume a pack, given the digest of its plan.

    If the block fails before a shard is finished, the destination is cleared.

    Raises:
        PackError: If the destination holds an unfinished pack with a different plan, or a tar that is not in this plan.
    """
    folder.remove_partial()
    unfinished = UnfinishedDataset(folder=folder, mark=digest.encode())
    mark = _read_mark(folder)
    if mark is None:
        folder.mark(unfinished.mark)
    else:
        _refuse_other_plan(folder, mark, digest)
        _refuse_unplanned(folder, names)
    try:
        yield unfinished
    # KeyboardInterrupt is not an Exception, so Ctrl-C clears nothing, and the pack can be resumed.
    except Exception:  # Re-raised.
        _clear_if_empty(unfinished)
        raise


def finish(manifests: Mapping[UnfinishedDataset, Manifest]) -> None:
    """Write the manifests that complete unfinished datasets, and remove their marks and journals.

    Raises:
        PackError: If shards are lost because a destination was removed or replaced during the pack.
    """
    for unfinished, manifest in manifests.items():
        _write_manifest(unfinished, manifest)
    for unfinished in manifests:  # If this loop is interrupted, a later run completes it: see are_ending.
        _unmark(unfinished.folder)


def are_ending(folders: Sequence[DatasetFolder]) -> bool:
    """Return whether a pack with several destinations was interrupted after it had written all their manifests."""
    if len(folders) == 1:
        return False
    names = [folder.list_names() for folder in folders]
    are_marked = [UNFINISHED_NAME in each for each in names]
    return any(are_marked) and not all(are_marked) and all(MANIFEST_NAME in each for each in names)


def end(digests: Mapping[DatasetFolder, str]) -> list[Manifest]:
    """Finish a pack that :func:`are_ending` recognized, given the digests of its plans, and return the manifests.

    Raises:
        PackError: If the pack had a different plan.
    """
    for folder, digest in digests.items():
        if (mark := _read_mark(folder)) is not None:
            _refuse_other_plan(folder, mark, digest)
    for folder in digests:
        _unmark(folder)
    return [read_manifest(folder.location / MANIFEST_NAME) for folder in digests]


def _write_manifest(unfinished: UnfinishedDataset, manifest: Manifest) -> None:
    where, mark = unfinished.folder.location, _read_mark(unfinished.folder)
    if mark is None and (where / MANIFEST_NAME).exists() and read_manifest(where / MANIFEST_NAME) == manifest:
        return  # Object stores have no locks: another run of the same pack may have finished first.
    if mark is None:
        raise PackError(f"{where} was removed during the pack: delete any directory with that name, and pack again")
    if mark != unfinished.mark:
        raise PackError(
            f"another program has started writing to {where}, and has replaced shards of this pack: choose another "
            "destination, and pack again"
        )
    write_manifest(where / MANIFEST_NAME, manifest)


def _unmark(folder: DatasetFolder) -> None:
    (folder.location / UNFINISHED_NAME).remove()
    folder.remove_journal()


def _read_mark(folder: DatasetFolder) -> bytes | None:
    """Return the content of the mark of an unfinished dataset, or None if it has no mark."""
    try:
        return (folder.location / UNFINISHED_NAME).read_whole()
    except FileNotFoundError:
        return None


def _refuse_other_plan(folder: DatasetFolder, mark: bytes, digest: str) -> None:
    if mark != digest.encode():
        raise PackError(
            f"{folder.location} holds an unfinished pack of different images or with different settings: delete "
            f"{folder.location} or choose another destination"
        )


@contextmanager
def new_dataset(folder: DatasetFolder, *, overwrite: bool) -> Iterator[UnfinishedDataset]:
    """Create or clear a folder, lock it and mark it as unfinished for the duration of a block.

    The block must write the manifest and remove the mark. If the block raises an exception, the finished shards and the
    mark remain; if no shard is finished, nothing remains.

    Args:
        folder: The folder, which must be missing or empty, or hold a dataset that ``overwrite`` replaces.
        overwrite: Whether to remove existing shards and the existing manifest.

    Raises:
        PackError: If the folder cannot be used.
    """
    with folder.locked():
        _check_content(folder, overwrite=overwrite)
        unfinished = UnfinishedDataset(folder=folder, mark=MARK + b" " + os.urandom(8).hex().encode())
        folder.mark(unfinished.mark, replace=overwrite)
        _clear(folder)
        try:
            yield unfinished
        except BaseException:  # Re-raised: even Ctrl-C must not leave unfinished files.
            _clear_if_empty(unfinished)
            raise


def _clear_if_empty(unfinished: UnfinishedDataset) -> None:
    folder = unfinished.folder
    with suppress(OSError):  # The folder may have been removed, or the store may be unreachable.
        folder.remove_partial()
        is_empty = not any(name.endswith(".tar") for name in folder.list_names())
        if is_empty and _read_mark(folder) == unfinished.mark:  # If the mark differs, it belongs to another writer.
            _unmark(folder)


def holds_unfinished(folder: DatasetFolder) -> bool:
    """Return whether a folder holds a dataset that a program has not finished writing."""
    mark = _read_mark(folder)
    return mark is not None and mark.startswith(MARK)


def whole_names(folder: DatasetFolder) -> list[str]:
    """Return the sorted names of the files in a folder, except lock files and partial files."""
    return [name for name in folder.list_names() if find_target(name) is None]


def _check_content(folder: DatasetFolder, *, overwrite: bool) -> None:
    names, where = whole_names(folder), folder.location
    foreign = [name for name in names if not _is_ours(name)]
    if foreign:
        raise PackError(
            f"the directory {where} holds {foreign[0]}, which shardio did not write: choose an empty directory"
        )
    if not names or overwrite:
        return
    if UNFINISHED_NAME in names:
        raise PackError(
            f"{where} holds an unfinished dataset: if nothing is writing to it, pass --overwrite (overwrite=True) to "
            "start again, or choose another directory"
        )
    raise PackError(
        f"{where} is not empty (it holds {names[0]}): choose another directory, or pass --overwrite (overwrite=True) "
        "to replace the dataset there"
    )


def _is_ours(name: str) -> bool:
    return (
        bool(PACKED_NAME.fullmatch(name.removesuffix(".idx"))) or name in _OTHER_NAMES or name.startswith(".shardio-")
    )


def _clear(folder: DatasetFolder) -> None:
    """Remove an earlier dataset, starting with its manifest. Readers reject a folder without a manifest."""
    folder.remove_partial()
    (folder.location / MANIFEST_NAME).remove()
    folder.remove([name for name in whole_names(folder) if name not in (MANIFEST_NAME, UNFINISHED_NAME)])


def _refuse_unplanned(folder: DatasetFolder, names: Collection[str]) -> None:
    for name in folder.list_names():
        if name.endswith(".tar") and name not in names and not name.startswith("."):
            raise PackError(explain_foreign(folder.location / name, "no shard of the pack has that name"))


def explain_foreign(tar: Location, why: str) -> str:
    """Return the message about a tar that is not a shard of the plan."""
    return f"{tar} is not a shard of the unfinished pack in {tar.folder}: {why}. Move it elsewhere or delete it"
