"""The destination: what may lie there before, and how an unfinished pack is known again."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from shardio.errors import FormatError, PackError
from shardio.packing.plan import Plan, ShardPlan
from shardio.shards import MANIFEST_NAME, Manifest, Shard, ShardEntry, index_path, write_manifest
from shardio.storage import PARTIAL_SUFFIX, write_whole

PLAN_NAME = f".shardio-pack{PARTIAL_SUFFIX}"
"""While a pack is unfinished, this file holds its plan's digest."""


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
    is_unfinished = (dst / PLAN_NAME).exists()
    if (dst / MANIFEST_NAME).exists() and not is_unfinished:
        raise PackError(f"{dst} already holds a packed dataset: choose another destination, or delete it first")
    names = sorted(path.name for path in dst.iterdir() if not path.name.startswith(f".{PLAN_NAME}."))
    if names and not is_unfinished:
        raise PackError(f"the destination {dst} is not empty, it holds {names[0]}: choose an empty directory")


def begin(dst: Path, plan: Plan) -> None:
    """Make the destination ready for a plan, or for going on with it.

    Raises:
        PackError: If an unfinished pack of another plan lies there.
    """
    try:
        dst.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PackError(f"the destination {dst} cannot be made: {error.strerror}") from error
    for leftover in dst.glob(f".*.*{PARTIAL_SUFFIX}"):
        if leftover.name != PLAN_NAME:
            leftover.unlink()  # What a killed run was writing.
    note = dst / PLAN_NAME
    if note.exists():
        if note.read_text() != plan.digest:
            raise PackError(
                f"{dst} holds an unfinished pack of other images or with other settings: delete {dst}, or "
                "choose another destination"
            )
        return
    with write_whole(note) as file:
        file.write(plan.digest.encode())


def find_finished(dst: Path, shard: ShardPlan) -> tuple[ShardEntry, tuple[str, ...]] | None:
    """Return a shard that an earlier run finished (entry and fields), or None."""
    with suppress(FileNotFoundError, FormatError), Shard(dst / shard.name, index_path(dst / shard.name)) as found:
        return found.entry, found.index.header.fields
    return None


def finish(dst: Path, manifest: Manifest) -> None:
    """Commit the pack: from here on the destination holds a dataset."""
    write_manifest(dst / MANIFEST_NAME, manifest)
    (dst / PLAN_NAME).unlink()
