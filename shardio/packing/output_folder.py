"""The folder of a dataset that one program or several processes write: its mark, and the records of workers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from shardio.errors import FormatError, PackError
from shardio.files import find_target
from shardio.packing.folders import DatasetFolder, choose_folder
from shardio.packing.names import find_duplicate
from shardio.packing.packer import UnfinishedDataset, read_mark
from shardio.packing.shard_job import REJECTED_NAME
from shardio.shards import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    Shard,
    ShardEntry,
    ShardTable,
    index_location,
    read_manifest,
    write_manifest,
)
from shardio.storage import Location, StorageOptions, make_direct_access, map_locations, parse_location
from shardio.values import parse_json

MARK = b"written by a program"
"""The start of the mark. A pack's mark differs, so a pack refuses to continue here."""

SHARD_NAME = re.compile(r"shard-([0-9]{5}-)?[0-9]{6,}\.tar(\.idx)?")
"""The names of shards that shardio writes, and of their indexes."""

_OTHER_NAMES = {MANIFEST_NAME, REJECTED_NAME}

_RECORD = re.compile(r"\.shardio-worker-([0-9]{5})\.json")
"""The name of the file that a worker writes when it has finished."""


@contextmanager
def new_dataset(folder: DatasetFolder, *, overwrite: bool) -> Iterator[UnfinishedDataset]:
    """Create or clear a folder, lock it and mark it as unfinished for the duration of a block.

    The block must write the manifest and remove the mark. If it raises, finished shards and the mark stay; if no shard
    is finished, nothing stays.

    Args:
        folder: The folder. It must not exist or be empty, or hold a dataset that ``overwrite`` replaces.
        overwrite: Whether to remove the shards and the manifest that are there.

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
        except BaseException:  # Re-raised: Ctrl-C must not leave unfinished files either.
            with suppress(OSError):  # It may have been removed.
                folder.remove_partial()
                is_empty = not any(name.endswith(".tar") for name in folder.list_names())
                if is_empty and read_mark(folder) == unfinished.mark:  # Otherwise, another writer has begun.
                    (folder.location / UNFINISHED_NAME).remove()
            raise


def holds_unfinished(folder: DatasetFolder) -> bool:
    """Return whether a folder holds a dataset that a program has not finished writing."""
    mark = read_mark(folder)
    return mark is not None and mark.startswith(MARK)


def whole_names(folder: DatasetFolder) -> list[str]:
    """Return the names of the files in a folder, sorted, without locks and partial files."""
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
    return bool(SHARD_NAME.fullmatch(name)) or name in _OTHER_NAMES or name.startswith(".shardio-")


def _clear(folder: DatasetFolder) -> None:
    """Remove a former dataset, and its manifest first, without which readers refuse the folder."""
    folder.remove_partial()
    (folder.location / MANIFEST_NAME).remove()
    folder.remove([name for name in whole_names(folder) if name not in (MANIFEST_NAME, UNFINISHED_NAME)])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A record of the shards that a worker has written.

    Attributes:
        worker: The worker's number, from 0.
        num_workers: The number of workers.
        shards: Its shards.
        fields: The names of their fields, sorted.
        classes: The class names by label.
        pack: The settings, for the manifest.
    """

    worker: int
    num_workers: int
    shards: tuple[ShardEntry, ...]
    fields: tuple[str, ...]
    classes: tuple[str, ...]
    pack: dict[str, Any]


def name_worker_shard(worker: int, number: int) -> str:
    """Return the name of a shard of a worker. Names sort by worker, then by number."""
    return f"{_prefix(worker)}{number:06d}.tar"


@contextmanager
def worker_part(folder: DatasetFolder, worker: int, num_workers: int, *, overwrite: bool) -> Iterator[None]:
    """Prepare a folder for one of several workers, and lock this worker's part for the duration of a block.

    Raises:
        PackError: If the folder holds anything but parts of a run with this number of workers, or if this worker's
            part exists and ``overwrite`` is off.
    """
    out = folder.location
    with folder.locked(f".shardio-worker-{worker:05d}.lock"):
        _check_folder(folder, num_workers)
        names = folder.list_names()
        own = [name for name in names if name.startswith(_prefix(worker)) or name == _record_name(worker)]
        if own and not overwrite:
            raise PackError(
                f"{out} already holds files of worker {worker}, such as {own[-1]}: pass overwrite=True to write "
                "this worker's part again, or choose another directory"
            )
        partial = [name for name in names if (find_target(name) or "").startswith(_prefix(worker))]
        (out / _record_name(worker)).remove()  # First, because the part is unfinished without it.
        folder.remove([*own, *partial])
        folder.mark(_mark(num_workers))
        yield


def write_record(out: Location, record: WorkerRecord) -> None:
    """Record that a worker has finished."""
    with (out / _record_name(record.worker)).write_whole() as file:
        file.write(json.dumps(asdict(record), sort_keys=True).encode())


def finalize(out: str | os.PathLike[str], *, storage_options: StorageOptions | None = None) -> Manifest:
    """Join the parts that several ShardWriters with ``worker=`` have written, and write the manifest.

    Shards are listed by worker, then by number. Call this once, after all workers have ended. If it is interrupted,
    call it again.

    Args:
        out: The directory, or its URL.
        storage_options: Settings of the object store, as for :class:`shardio.ShardDataset`.

    Returns:
        The manifest of the dataset.

    Raises:
        PackError: If a worker has not ended, a shard is missing or damaged, two samples have the same key, or there
            are no samples.
    """
    location = parse_location(out, make_direct_access(storage_options))
    if not location.is_folder():
        raise PackError(f"the directory {location} does not exist: pass the directory that the workers wrote to")
    folder = choose_folder(location)
    with folder.locked():
        names = whole_names(folder)
        if MANIFEST_NAME in names and UNFINISHED_NAME not in names:
            _remove_records(folder)  # An earlier call was interrupted after it had written the manifest.
            return read_manifest(location / MANIFEST_NAME)
        records = _read_records(folder)
        manifest = _join(folder, records)
        write_manifest(location / MANIFEST_NAME, manifest)
        (location / UNFINISHED_NAME).remove()
        _remove_records(folder)
    return manifest


def _read_entry(tar: Location) -> ShardEntry:
    try:
        with Shard(tar, index_location(tar)) as shard:
            return shard.entry
    except (FormatError, OSError) as error:
        raise PackError(f"{tar} cannot be read: {error}. Write its worker's part again") from error


def _join(folder: DatasetFolder, records: Sequence[WorkerRecord]) -> Manifest:
    location = folder.location
    entries = [entry for record in records for entry in record.shards]
    if not entries:
        raise PackError(f"no worker wrote a sample to {location}: there is no dataset to finish")
    names = {entry.name for entry in entries}
    if unlisted := [name for name in folder.list_names() if name.endswith(".tar") and name not in names]:
        raise PackError(f"{location / unlisted[0]} belongs to no worker that has ended: move it away or delete it")
    tars = tuple(location / entry.name for entry in entries)
    indexes = tuple(map(index_location, tars))
    for tar, found, entry in zip(tars, map_locations(_read_entry, tars), entries, strict=True):
        if found != entry:
            raise PackError(f"{tar} is not the shard that its worker wrote: write its worker's part again")
    manifest = Manifest(
        shards=tuple(entries),
        fields=tuple(sorted({field for record in records for field in record.fields})),
        classes=records[0].classes,
        pack=records[0].pack,
    )
    if found_twice := find_duplicate([ShardTable(manifest=manifest, tars=tars, indexes=indexes)]):
        key, first, second = found_twice
        raise PackError(
            f"two samples have the key {key!r}, one in {first} and one in {second}: give each sample a key of its own, "
            "and write the parts of these workers again"
        )
    return manifest


def _check_folder(folder: DatasetFolder, num_workers: int) -> None:
    out, names = folder.location, whole_names(folder)
    mark = out / UNFINISHED_NAME
    if MANIFEST_NAME in names:
        raise PackError(f"{out} already holds a packed dataset: choose another directory or delete it first")
    if UNFINISHED_NAME in names and mark.read_whole() != _mark(num_workers):
        raise PackError(
            f"{out} holds an unfinished dataset that was not written by {num_workers} workers: delete {out} or choose "
            "another directory"
        )
    foreign = [name for name in names if not _is_of_workers(name)]
    if foreign:
        raise PackError(f"the directory {out} holds {foreign[0]}, which no worker wrote: choose an empty directory")


def _read_records(folder: DatasetFolder) -> list[WorkerRecord]:
    where = folder.location
    names = [name for name in whole_names(folder) if _RECORD.fullmatch(name)]
    records = [_read_record(where / name) for name in names]
    if not records:
        raise PackError(
            f"{where} holds no finished part of a ShardWriter with worker=: wait until the workers have ended"
        )
    num_workers = records[0].num_workers
    if missing := sorted(set(range(num_workers)) - {record.worker for record in records}):
        listed = ", ".join(map(str, missing[:20]))
        raise PackError(
            f"{len(missing)} of the {num_workers} workers of {where} have not ended ({listed}): wait for them, or run "
            "them again with overwrite=True"
        )
    for record in records:
        if (record.num_workers, record.classes) != (num_workers, records[0].classes):
            raise PackError(
                f"workers 0 and {record.worker} of {where} had different num_workers or classes: write all parts "
                "with the same ones"
            )
    return records


def _read_record(location: Location) -> WorkerRecord:
    try:
        values = parse_json(location.read_whole())
        values["shards"] = tuple(ShardEntry(**entry) for entry in values["shards"])
        for name in "fields", "classes":
            values[name] = tuple(values[name])
        return WorkerRecord(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise PackError(f"{location} is damaged ({error!r}): write this worker's part again") from error


def _remove_records(folder: DatasetFolder) -> None:
    folder.remove([name for name in whole_names(folder) if _RECORD.fullmatch(name)])


def _is_of_workers(name: str) -> bool:
    is_shard = re.fullmatch(r"shard-[0-9]{5}-[0-9]{6,}\.tar(\.idx)?", name)
    return name == UNFINISHED_NAME or bool(is_shard) or bool(_RECORD.fullmatch(name))


def _prefix(worker: int) -> str:
    return f"shard-{worker:05d}-"


def _record_name(worker: int) -> str:
    return f".shardio-worker-{worker:05d}.json"


def _mark(num_workers: int) -> bytes:
    return b"written by %d workers" % num_workers
