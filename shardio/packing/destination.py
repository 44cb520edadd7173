"""The destination: what may lie there before, and how an unfinished pack is known again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from shardio.errors import FormatError, PackError
from shardio.packing.plan import Plan
from shardio.shards import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    Shard,
    index_path,
    write_manifest,
)
from shardio.storage import PARTIAL_SUFFIX, write_whole

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
def locked(dst: Path) -> Iterator[None]:
    """Make the destination and hold it for this process.

    Raises:
        PackError: If it cannot be made, or another process is packing into it.
    """
    try:
        dst.mkdir(parents=True, exist_ok=True)
        with FileLock(dst / LOCK_NAME, timeout=0):
            yield
            (dst / LOCK_NAME).unlink(missing_ok=True)
    except Timeout as error:
        raise PackError(f"another process is packing into {dst}: wait for it, or choose another destination") from error
    except (FileExistsError, NotADirectoryError) as error:
        raise PackError(f"the destination {dst} cannot be made: {error.strerror}") from error


def begin(dst: Path, plan: Plan) -> None:
    """Make the destination ready for a plan, or for going on with it.

    Raises:
        PackError: If an unfinished pack of another plan lies there.
    """
    for leftover in dst.glob(f".*.*{PARTIAL_SUFFIX}"):
        if leftover.name != UNFINISHED_NAME:
            leftover.unlink()  # What a killed run was writing.
    note = dst / UNFINISHED_NAME
    if note.exists():
        if note.read_text() != plan.digest:
            raise PackError(
                f"{dst} holds an unfinished pack of other images or with other settings: delete {dst}, or "
                "choose another destination"
            )
        return
    with write_whole(note) as file:
        file.write(plan.digest.encode())


def find_finished(dst: Path, plan: Plan) -> set[str]:
    """Return the names of the shards that an earlier run finished."""
    finished = set()
    for shard in plan.shards:
        path = dst / shard.name
        with suppress(FileNotFoundError, FormatError), Shard(path, index_path(path)):
            finished.add(shard.name)
    return finished


def finish(dst: Path, manifest: Manifest) -> None:
    """Commit the pack: from here on the destination holds a dataset."""
    write_manifest(dst / MANIFEST_NAME, manifest)
    (dst / UNFINISHED_NAME).unlink()


def _is_ours(name: str) -> bool:
    """Say whether a file is the lock, or what a killed run was writing when it noted its plan."""
    return name == LOCK_NAME or name.startswith(f".{UNFINISHED_NAME}.")
