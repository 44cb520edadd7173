"""The destination directory: what it may contain, and how to recognise an unfinished pack."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardio.errors import PackError
from shardio.packing.finished import refuse_unplanned
from shardio.packing.journal import JOURNAL_NAME
from shardio.packing.locking import LOCK_NAME, locked_folder
from shardio.packing.plan import PackPlan
from shardio.shards import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    read_manifest,
    write_manifest,
)
from shardio.storage import parse_location
from shardio.whole_writes import find_target, remove_unfinished, write_whole


def check_destination(src: Path, dst: Path) -> None:
    """Refuse a destination that overlaps the source or contains anything other than an unfinished pack.

    Raises:
        PackError: If ``dst`` cannot be packed into.
    """
    if dst.exists() and not dst.is_dir():
        raise PackError(f"the destination {dst} is not a directory: choose another path")
    here, there = src.resolve(), dst.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise PackError(f"the destination {dst} and the source {src} overlap: choose a separate directory")
    if not dst.exists():
        return
    is_unfinished = (dst / UNFINISHED_NAME).exists()
    if (dst / MANIFEST_NAME).exists() and not is_unfinished:
        raise PackError(f"{dst} already holds a packed dataset: choose another destination or delete it first")
    names = sorted(path.name for path in dst.iterdir() if not _is_ours(path.name))
    if names and not is_unfinished:
        raise PackError(f"the destination {dst} is not empty (it holds {names[0]}): choose an empty directory")


@contextmanager
def locked(src: Path, dst: Path) -> Iterator[None]:
    """Create the destination, lock it for this process, and check it again.

    Another pack may have finished since the first check.

    Raises:
        PackError: If the destination cannot be created or written, another process is writing to it, or it can no
            longer be packed into.
    """
    try:
        with locked_folder(dst):
            check_destination(src, dst)
            yield
    except OSError as error:
        raise PackError(
            f"packing into {dst} failed: {error}. Fix the cause (if the disk is full, free some space) and rerun the "
            "same command to resume: finished shards are kept"
        ) from error


@contextmanager
def begun(dst: Path, plan: PackPlan) -> Iterator[None]:
    """Prepare the destination to start or resume a plan. If that fails before a shard is finished, leave nothing there.

    Raises:
        PackError: If the destination holds an unfinished pack of another plan, or a tar that is not in this plan.
    """
    remove_unfinished(dst)
    marker = dst / UNFINISHED_NAME
    if marker.exists():
        _refuse_other_plan(dst, plan)
        refuse_unplanned(dst, plan.names)
    else:
        with write_whole(marker) as file:
            file.write(plan.digest.encode())
    try:
        yield
    except Exception:  # Re-raised. Ctrl-C is not among them: what it interrupts can be resumed.
        if dst.exists():
            remove_unfinished(dst)
        if not any(dst.glob("*.tar")):
            (dst / JOURNAL_NAME).unlink(missing_ok=True)
            marker.unlink(missing_ok=True)
        raise


def finish(manifests: Mapping[Path, Manifest]) -> None:
    """Write the manifests of one pack's destinations, which makes them datasets, and remove the pack's journals.

    Raises:
        PackError: If a destination was removed during the pack, so that shards are lost.
    """
    for dst, manifest in manifests.items():
        _write_manifest(dst, manifest)
    for dst in manifests:  # From here on, nothing can be lost: see are_ending.
        _unmark(dst)


def are_ending(dsts: Sequence[Path]) -> bool:
    """Return whether a pack with several destinations was interrupted after it had written all their manifests."""
    are_marked = [(dst / UNFINISHED_NAME).exists() for dst in dsts]
    return any(are_marked) and not all(are_marked) and all((dst / MANIFEST_NAME).exists() for dst in dsts)


def end(plans: Mapping[Path, PackPlan]) -> list[Manifest]:
    """End a pack that :func:`are_ending` recognised, and return the manifests.

    Raises:
        PackError: If it was a pack of another plan.
    """
    for dst, plan in plans.items():
        if (dst / UNFINISHED_NAME).exists():
            _refuse_other_plan(dst, plan)
    for dst in plans:
        _unmark(dst)
    return [read_manifest(parse_location(dst / MANIFEST_NAME)) for dst in plans]


def _write_manifest(dst: Path, manifest: Manifest) -> None:
    """Write the manifest. The destination stays marked as unfinished.

    Raises:
        PackError: If the destination was removed during the pack, so that shards are lost.
    """
    if not (dst / UNFINISHED_NAME).exists():
        raise PackError(
            f"{dst} was removed during the pack: delete the directory of that name, if there is one, and pack again"
        )
    write_manifest(parse_location(dst / MANIFEST_NAME), manifest)


def _unmark(dst: Path) -> None:
    """Remove the mark of an unfinished dataset and the pack's journal, if they are there."""
    (dst / UNFINISHED_NAME).unlink(missing_ok=True)
    (dst / JOURNAL_NAME).unlink(missing_ok=True)


def _refuse_other_plan(dst: Path, plan: PackPlan) -> None:
    """Raise PackError if an unfinished destination is that of another plan."""
    if parse_location(dst / UNFINISHED_NAME).read_whole() != plan.digest.encode():
        raise PackError(
            f"{dst} holds an unfinished pack of different images or with different settings: delete {dst} or choose "
            "another destination"
        )


def _is_ours(name: str) -> bool:
    """Return whether a file is the lock, or a plan's digest that a killed run had not finished writing."""
    return name == LOCK_NAME or find_target(name) == UNFINISHED_NAME
