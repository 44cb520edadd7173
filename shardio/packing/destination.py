"""The destination of a pack: what it may contain, and how to recognise an unfinished pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import PackError
from shardio.packing.finished import refuse_unplanned
from shardio.packing.folders.folder import DatasetFolder
from shardio.packing.plan import PackPlan
from shardio.shards import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    read_manifest,
    write_manifest,
)
from shardio.storage import Location
from shardio.whole_writes import find_target


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedDataset:
    """A dataset that this program is writing.

    Attributes:
        folder: Its folder.
        mark: The content of the mark in the folder. A different one is that of another writer.
    """

    folder: DatasetFolder
    mark: bytes


def check_destination(src: Path, folder: DatasetFolder) -> None:
    """Refuse a destination that overlaps the source or contains anything other than an unfinished pack.

    Raises:
        PackError: If it cannot be packed into.
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
        PackError: If the destination cannot be created or written, another process is writing to it, or it can no
            longer be packed into.
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
def begun(folder: DatasetFolder, plan: PackPlan) -> Iterator[UnfinishedDataset]:
    """Prepare the destination to start or resume a plan. If that fails before a shard is finished, leave nothing there.

    Raises:
        PackError: If the destination holds an unfinished pack of another plan, or a tar that is not in this plan.
    """
    folder.remove_partial()
    unfinished = UnfinishedDataset(folder=folder, mark=plan.digest.encode())
    mark = read_mark(folder)
    if mark is None:
        folder.mark(unfinished.mark)
    else:
        _refuse_other_plan(folder, mark, plan)
        refuse_unplanned(folder, plan.names)
    try:
        yield unfinished
    except Exception:  # Re-raised. Ctrl-C is not among them: what it interrupts can be resumed.
        with suppress(OSError):  # A store that cannot be reached.
            folder.remove_partial()
            if not any(name.endswith(".tar") for name in folder.list_names()):
                _unmark(folder)
        raise


def finish(manifests: Mapping[UnfinishedDataset, Manifest]) -> None:
    """Write the manifests of unfinished datasets, which makes them datasets, and remove their marks and journals.

    Raises:
        PackError: If a destination was removed or replaced meanwhile, so that shards are lost.
    """
    for unfinished, manifest in manifests.items():
        _write_manifest(unfinished, manifest)
    for unfinished in manifests:  # From here on, nothing can be lost: see are_ending.
        _unmark(unfinished.folder)


def are_ending(folders: Sequence[DatasetFolder]) -> bool:
    """Return whether a pack with several destinations was interrupted after it had written all their manifests."""
    if len(folders) == 1:
        return False
    names = [folder.list_names() for folder in folders]
    are_marked = [UNFINISHED_NAME in each for each in names]
    return any(are_marked) and not all(are_marked) and all(MANIFEST_NAME in each for each in names)


def end(plans: Mapping[DatasetFolder, PackPlan]) -> list[Manifest]:
    """End a pack that :func:`are_ending` recognised, and return the manifests.

    Raises:
        PackError: If it was a pack of another plan.
    """
    for folder, plan in plans.items():
        if (mark := read_mark(folder)) is not None:
            _refuse_other_plan(folder, mark, plan)
    for folder in plans:
        _unmark(folder)
    return [read_manifest(folder.location / MANIFEST_NAME) for folder in plans]


def _write_manifest(unfinished: UnfinishedDataset, manifest: Manifest) -> None:
    """Write the manifest. The destination stays marked as unfinished.

    Raises:
        PackError: If the destination was removed or replaced during the pack, so that shards are lost.
    """
    where, mark = unfinished.folder.location, read_mark(unfinished.folder)
    if mark is None and _has_manifest(where, manifest):
        return  # Stores without locks admit several runs of one pack. Another one has ended first.
    if mark is None:
        raise PackError(
            f"{where} was removed during the pack: delete the directory of that name, if there is one, and pack again"
        )
    if mark != unfinished.mark:
        raise PackError(
            f"another program has begun to write to {where}, and has replaced shards of this one: choose another "
            "destination, and pack again"
        )
    write_manifest(where / MANIFEST_NAME, manifest)


def _has_manifest(where: Location, manifest: Manifest) -> bool:
    """Return whether a folder has a manifest."""
    location = where / MANIFEST_NAME
    return location.exists() and read_manifest(location) == manifest


def _unmark(folder: DatasetFolder) -> None:
    """Remove the mark of an unfinished dataset and the pack's journal, if they are there."""
    (folder.location / UNFINISHED_NAME).remove()
    folder.remove_journal()


def read_mark(folder: DatasetFolder) -> bytes | None:
    """Return the content of the mark of an unfinished dataset; None if there is none."""
    try:
        return (folder.location / UNFINISHED_NAME).read_whole()
    except FileNotFoundError:
        return None


def _refuse_other_plan(folder: DatasetFolder, mark: bytes, plan: PackPlan) -> None:
    """Raise PackError if a mark is that of another plan."""
    if mark != plan.digest.encode():
        raise PackError(
            f"{folder.location} holds an unfinished pack of different images or with different settings: delete "
            f"{folder.location} or choose another destination"
        )
