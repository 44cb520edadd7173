"""Shards that an earlier run of the same pack finished: how they are noted, and known again."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardio.errors import FormatError, PackError
from shardio.packing.jpegs import JpegTally
from shardio.packing.plan import Plan, ShardPlan
from shardio.packing.sources import Problem
from shardio.shards import Shard, ShardEntry, index_location, list_names, split_name
from shardio.storage import Location, parse_location, read_pieces
from shardio.whole_writes import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A finished shard: its entry, the names of its fields, what became of its JPEGs, and whether it was there."""

    entry: ShardEntry
    fields: tuple[str, ...]
    jpegs: JpegTally
    was_kept: bool


def note_finished(path: Path, tally: JpegTally) -> None:
    """Note the digest of a shard's index, which has the tar's, and what became of its JPEGs, for a later run."""
    digest = _digest_file(index_location(parse_location(path)))
    with write_whole(note_path(path)) as file:
        file.write(digest.encode() + b"\n" + tally.dump())


def note_path(shard: Path) -> Path:
    """Return where the note of a finished shard lies until the whole pack is finished."""
    return shard.with_name(f".{shard.name}.jpegs")


def find_finished(dst: Path, plan: ShardPlan) -> Written | Problem | None:
    """Return a shard as an earlier run finished it, if its content and its index are still what that run wrote.

    Returns:
        None if the shard must be written because no run finished it, and what is wrong if it must be written again.

    Raises:
        PackError: If a tar lies in its place that is not of this pack.
    """
    path, problem = dst / plan.name, None
    try:
        written = _read_finished(path)
        # Where samples are missing, their files had changed and were left out: they may be as they were again.
        return written if written.entry.num_samples == len(plan.samples) else None
    except FileNotFoundError:
        pass  # The run was killed before it had noted the shard.
    except FormatError as error:
        problem = Problem(path=path, what=f"was damaged after it was written: {error}")
    _refuse_foreign(path, plan, is_noted=problem is not None)
    return problem


def refuse_unplanned(dst: Path, plan: Plan) -> None:
    """Raise PackError if a tar lies in the destination that no shard of the plan is named like."""
    names = {shard.name for shard in plan.shards}
    for path in sorted(dst.glob("*.tar")):
        if path.name not in names and not path.name.startswith("."):
            raise PackError(_explain_foreign(path, f"this pack has {len(names)} shards, and none of that name"))


def _read_finished(path: Path) -> Written:
    """Return a finished shard; raise FileNotFoundError if it was not noted, and FormatError if it is another now."""
    digest, _, tally = parse_location(note_path(path)).read_whole().partition(b"\n")
    tar = parse_location(path)
    jpegs, index = JpegTally.load(tally), index_location(tar)
    try:
        if _digest_file(index).encode() != digest:
            raise FormatError(f"the content of {index.name} has changed")
        with Shard(tar, index) as shard:
            if _digest_file(tar) != shard.entry.digest:
                raise FormatError("its content does not match its index")
            return Written(entry=shard.entry, fields=shard.index.header.fields, jpegs=jpegs, was_kept=True)
    except FileNotFoundError as error:
        raise FormatError(f"{error.filename} is gone") from error


def _refuse_foreign(path: Path, plan: ShardPlan, *, is_noted: bool) -> None:
    """Raise PackError if a tar holds samples that the plan has not; if it cannot be read, only where none was noted."""
    if not os.path.lexists(path):
        return
    try:
        with closing(parse_location(path).open()) as tar:
            names = [split_name(name) for name in list_names(tar)]
    except (FormatError, OSError) as error:
        if is_noted:
            return
        raise PackError(_explain_foreign(path, f"it cannot be read as a tar ({error})")) from error
    planned = {sample.key for sample in plan.samples}
    for name in names:
        if name is None or name[0] not in planned:
            raise PackError(_explain_foreign(path, f"it holds {name[0] if name else 'a member without a key'!r}"))


def _explain_foreign(path: Path, why: str) -> str:
    return f"{path} is not a shard of the pack that is unfinished there: {why}. Move it away, or delete it"


def _digest_file(location: Location) -> str:
    """Return the xxh3-128 of a file's content, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with closing(location.open()) as file:
        for piece in read_pieces(file):
            digest.update(piece)
    return digest.hexdigest()
