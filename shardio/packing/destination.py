"""The destination: what may lie there before, and how an unfinished pack is known again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from shardio.errors import PackError
from shardio.packing.finished import note_path, refuse_unplanned
from shardio.packing.plan import Plan
from shardio.shards import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    index_location,
    write_manifest,
)
from shardio.storage import parse_location
from shardio.whole_writes import PARTIAL_SUFFIX, write_whole

LOCK_NAME = ".shardio-pack.lock"


def check_destination(src: Path, dst: Path) -> None:
    """Refuse a destination that overlaps the source, holds a finished dataset, or something else.

    Raises:
        PackError: If ``dst`` must not be packed into.
    """
    if dst.exists() and not dst.is_dir():
        raise PackError(f"the destination {dst} is not a directory")
    here, there = src.resolve(), dst.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise PackError(f"the destination {dst} and the source {src} overlap: choose a directory beside it")
    if not dst.exists():
        return
    is_unfinished = (dst / UNFINISHED_NAME).exists()
    if (dst / MANIFEST_NAME).exists() and not is_unfinished:
        raise PackError(f"{dst} already holds a packed dataset: choose another destination, or delete it first")
    names = sorted(path.name for path in dst.iterdir() if not _is_ours(path.name))
    if names and not is_unfinished:
        raise PackError(f"the destination {dst} is not empty, it holds {names[0]}: choose an empty directory")


@contextmanager
def locked(src: Path, dst: Path) -> Iterator[None]:
    """Make the destination, hold it for this process, and check it again: another pack may have finished meanwhile.

    Raises:
        PackError: If it cannot be made or written, another process is packing into it, or it must not be packed into
            any more.
    """
    try:
        dst.mkdir(parents=True, exist_ok=True)
        with FileLock(dst / LOCK_NAME, timeout=0):
            try:
                check_destination(src, dst)
            except PackError:
                (dst / LOCK_NAME).unlink(missing_ok=True)
                raise
            yield
            (dst / LOCK_NAME).unlink(missing_ok=True)
    except Timeout as error:
        raise PackError(f"another process is packing into {dst}: wait for it, or choose another destination") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise PackError(f"the destination {dst} cannot be made: {error.strerror or error}") from error
    except OSError as error:
        raise PackError(
            f"packing into {dst} failed: {error}. Remove the cause (make room if the disk is full), and run the same "
            "command again: it keeps the shards that are finished"
        ) from error


def begin(dst: Path, plan: Plan) -> None:
    """Make the destination ready for a plan, or for going on with it.

    Raises:
        PackError: If an unfinished pack of another plan lies there, or a tar that is not of this one.
    """
    for leftover in dst.glob(f".*.*{PARTIAL_SUFFIX}"):
        if leftover.name != UNFINISHED_NAME:
            leftover.unlink()  # What a killed run was writing.
    note = dst / UNFINISHED_NAME
    if note.exists():
        if parse_location(note).read_whole() != plan.digest.encode():
            raise PackError(
                f"{dst} holds an unfinished pack of other images or with other settings: delete {dst}, or "
                "choose another destination"
            )
        refuse_unplanned(dst, plan)
        return
    with write_whole(note) as file:
        file.write(plan.digest.encode())


def remove_shard(path: Path) -> None:
    """Remove a shard that holds no sample."""
    shard = parse_location(path)
    for each in shard, index_location(shard), parse_location(note_path(path)):
        each.remove()


def finish(dst: Path, manifest: Manifest) -> None:
    """Commit the pack: from here on the destination holds a dataset."""
    write_manifest(parse_location(dst / MANIFEST_NAME), manifest)
    for shard in manifest.shards:
        note_path(dst / shard.name).unlink(missing_ok=True)
    (dst / UNFINISHED_NAME).unlink()


def _is_ours(name: str) -> bool:
    """Say whether a file is the lock, or what a killed run was writing when it noted its plan."""
    return name == LOCK_NAME or name.startswith(f".{UNFINISHED_NAME}.")
