"""Shards that an earlier run of the same pack finished: how they are recognised."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path

import xxhash

from shardio.errors import FormatError, PackError
from shardio.packing.packed_shard import PackedShard
from shardio.packing.sources.source import SourceSample
from shardio.shards import Shard, index_location, list_names, split_name
from shardio.storage import Location, parse_location, read_pieces


def find_finished(path: Path, samples: Sequence[SourceSample], earlier: PackedShard | None) -> PackedShard | str | None:
    """Return the shard that an earlier run finished, if its tar and its index are unchanged.

    Args:
        path: The shard's path.
        samples: The samples that it must hold.
        earlier: What the journal says about it.

    Returns:
        The shard; what is wrong with it if it was damaged and must be packed again; None if no run finished it.

    Raises:
        PackError: If a tar that is not part of this pack has the shard's name.
    """
    damage = None
    if earlier is not None:
        if earlier.changed:
            return None  # Files had changed, and their samples were left out. By now, the files may be restored.
        if (damage := _find_damage(path, earlier)) is None:
            return earlier.as_kept()
    _refuse_foreign(path, samples, is_recorded=damage is not None)
    return damage


def refuse_unplanned(folder: Path, names: Collection[str]) -> None:
    """Raise PackError if a folder holds a tar that is not one of the plan's."""
    for path in sorted(folder.glob("*.tar")):
        if path.name not in names and not path.name.startswith("."):
            raise PackError(_explain_foreign(path, f"none of the pack's {len(names)} shards has that name"))


def remove_shard(path: Path) -> None:
    """Remove a shard that has no samples, with its index."""
    shard = parse_location(path)
    for each in shard, index_location(shard):
        each.remove()


def digest_file(location: Location) -> str:
    """Return the xxh3-128 of a file's content in hexadecimal."""
    digest = xxhash.xxh3_128()
    with closing(location.open()) as file:
        for piece in read_pieces(file):
            digest.update(piece)
    return digest.hexdigest()


def _find_damage(path: Path, earlier: PackedShard) -> str | None:
    """Return what is wrong with a shard that a run finished; None if it is as that run left it."""
    if not earlier.entry.num_samples:
        return None
    tar = parse_location(path)
    index = index_location(tar)
    try:
        if digest_file(index) != earlier.index_digest:
            raise FormatError(f"the content of {index.name} has changed")
        with Shard(tar, index) as shard:
            if digest_file(tar) != shard.entry.digest:
                raise FormatError("its content does not match its index")
    except FileNotFoundError as error:
        return f"was damaged after it was written: {error.filename} is missing"
    except FormatError as error:
        return f"was damaged after it was written: {error}"
    return None


def _refuse_foreign(path: Path, samples: Sequence[SourceSample], *, is_recorded: bool) -> None:
    """Raise PackError if a tar holds samples that are not planned, or is unreadable and was not recorded."""
    if not os.path.lexists(path):
        return
    try:
        with closing(parse_location(path).open()) as tar:
            names = [split_name(name) for name in list_names(tar)]
    except (FormatError, OSError) as error:
        if is_recorded:
            return
        raise PackError(_explain_foreign(path, f"it is not a readable tar ({error})")) from error
    planned = {sample.key for sample in samples}
    for name in names:
        if name is None:
            raise PackError(_explain_foreign(path, "it holds a member whose name has no key"))
        if name[0] not in planned:
            raise PackError(_explain_foreign(path, f"this pack does not put the sample {name[0]!r} there"))


def _explain_foreign(path: Path, why: str) -> str:
    return f"{path} is not a shard of the unfinished pack in {path.parent}: {why}. Move it away or delete it"
