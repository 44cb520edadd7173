"""Shards that an earlier run of the same pack finished: how they are recorded and recognised."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import xxhash

from shardio.errors import FormatError, PackError
from shardio.packing.jpegs import JpegTally
from shardio.packing.plan import PackPlan, ShardPlan
from shardio.packing.sources import FileProblem
from shardio.shards import Shard, ShardEntry, index_location, list_names, split_name
from shardio.storage import Location, parse_location, read_pieces
from shardio.whole_writes import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedShard:
    """A finished shard.

    Attributes:
        entry: Its entry in the manifest.
        fields: The names of its fields.
        jpegs: How its JPEGs are stored.
        was_kept: Whether an earlier run wrote it.
    """

    entry: ShardEntry
    fields: tuple[str, ...]
    jpegs: JpegTally
    was_kept: bool


def record_finished(path: Path, tally: JpegTally) -> None:
    """Record the digest of a shard's index, which contains the tar's digest, and the tally of its JPEGs."""
    digest = _digest_file(index_location(parse_location(path)))
    with write_whole(record_path(path)) as file:
        file.write(digest.encode() + b"\n" + tally.dump())


def record_path(shard: Path) -> Path:
    """Return the path of a finished shard's record, which exists until the whole pack is finished."""
    return shard.with_name(f".{shard.name}.jpegs")


def find_finished(dst: Path, plan: ShardPlan) -> FinishedShard | FileProblem | None:
    """Return a shard that an earlier run finished, if its tar and its index are unchanged.

    Returns:
        The shard; a problem if it was damaged and must be packed again; None if no run finished it.

    Raises:
        PackError: If a tar that is not part of this pack has the shard's name.
    """
    path, problem = dst / plan.name, None
    try:
        written = _read_finished(path)
        # Missing samples were left out because their files had changed. By now, the files may be restored.
        return written if written.entry.num_samples == len(plan.samples) else None
    except FileNotFoundError:
        pass  # The run was killed before it recorded the shard.
    except FormatError as error:
        problem = FileProblem(path=path, what=f"was damaged after it was written: {error}")
    _refuse_foreign(path, plan, is_recorded=problem is not None)
    return problem


def refuse_unplanned(dst: Path, plan: PackPlan) -> None:
    """Raise PackError if the destination holds a tar whose name is not in the plan."""
    names = {shard.name for shard in plan.shards}
    for path in sorted(dst.glob("*.tar")):
        if path.name not in names and not path.name.startswith("."):
            raise PackError(_explain_foreign(path, f"none of the pack's {len(names)} shards has that name"))


def _read_finished(path: Path) -> FinishedShard:
    """Return a finished shard; raise FileNotFoundError if it has no record, and FormatError if it has changed."""
    digest, _, tally = parse_location(record_path(path)).read_whole().partition(b"\n")
    tar = parse_location(path)
    jpegs, index = JpegTally.load(tally), index_location(tar)
    try:
        if _digest_file(index).encode() != digest:
            raise FormatError(f"the content of {index.name} has changed")
        with Shard(tar, index) as shard:
            if _digest_file(tar) != shard.entry.digest:
                raise FormatError("its content does not match its index")
            return FinishedShard(entry=shard.entry, fields=shard.index.header.fields, jpegs=jpegs, was_kept=True)
    except FileNotFoundError as error:
        raise FormatError(f"{error.filename} is missing") from error


def _refuse_foreign(path: Path, plan: ShardPlan, *, is_recorded: bool) -> None:
    """Raise PackError if a tar holds samples that are not in the plan, or is unreadable and was not recorded."""
    if not os.path.lexists(path):
        return
    try:
        with closing(parse_location(path).open()) as tar:
            names = [split_name(name) for name in list_names(tar)]
    except (FormatError, OSError) as error:
        if is_recorded:
            return
        raise PackError(_explain_foreign(path, f"it is not a readable tar ({error})")) from error
    planned = {sample.key for sample in plan.samples}
    for name in names:
        if name is None:
            raise PackError(_explain_foreign(path, "it holds a member whose name has no key"))
        if name[0] not in planned:
            raise PackError(_explain_foreign(path, f"this pack does not put the sample {name[0]!r} there"))


def _explain_foreign(path: Path, why: str) -> str:
    return f"{path} is not a shard of the unfinished pack in {path.parent}: {why}. Move it away or delete it"


def _digest_file(location: Location) -> str:
    """Return the xxh3-128 of a file's content in hexadecimal."""
    digest = xxhash.xxh3_128()
    with closing(location.open()) as file:
        for piece in read_pieces(file):
            digest.update(piece)
    return digest.hexdigest()
