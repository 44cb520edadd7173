"""Shards that an earlier run of the same pack finished: how they are recognised."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import closing

from shardio.errors import FormatError, PackError, StoreError
from shardio.packing.folders.folder import DatasetFolder
from shardio.packing.packed_shard import PackedShard
from shardio.packing.sources.source import SourceSample
from shardio.shards import index_location, list_names, split_name
from shardio.storage import Location, find_path


def find_finished(
    folder: DatasetFolder, tar: Location, samples: Sequence[SourceSample], earlier: PackedShard | None
) -> PackedShard | str | None:
    """Return the shard that an earlier run finished, if its tar and its index are unchanged.

    Args:
        folder: The folder of the dataset.
        tar: The shard's location.
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
        damage = folder.find_damage(tar, earlier) if earlier.entry.num_samples else None
        if damage is None:
            return earlier.as_kept()
    _refuse_foreign(tar, samples, is_recorded=damage is not None)
    return damage


def refuse_unplanned(folder: DatasetFolder, names: Collection[str]) -> None:
    """Raise PackError if a folder holds a tar that is not one of the plan's."""
    for name in folder.list_names():
        if name.endswith(".tar") and name not in names and not name.startswith("."):
            why = f"none of the pack's {len(names)} shards has that name"
            raise PackError(_explain_foreign(folder.location / name, why))


def remove_shard(tar: Location) -> None:
    """Remove a shard that has no samples, with its index."""
    for each in tar, index_location(tar):
        each.remove()


def _refuse_foreign(tar: Location, samples: Sequence[SourceSample], *, is_recorded: bool) -> None:
    """Raise PackError if a tar holds samples that are not planned, or is unreadable and was not recorded."""
    try:
        with closing(tar.open()) as file:
            names = [split_name(name) for name in list_names(file)]
    except StoreError:  # The tar is not the cause.
        raise
    except (FormatError, OSError) as error:
        if is_recorded or _is_absent(tar, error):
            return
        raise PackError(_explain_foreign(tar, f"it is not a readable tar ({error})")) from error
    planned = {sample.key for sample in samples}
    for name in names:
        if name is None:
            raise PackError(_explain_foreign(tar, "it holds a member whose name has no key"))
        if name[0] not in planned:
            raise PackError(_explain_foreign(tar, f"this pack does not put the sample {name[0]!r} there"))


def _is_absent(tar: Location, error: Exception) -> bool:
    """Return whether an error says that there is nothing at a location, not even a link that leads nowhere."""
    path = find_path(tar)
    return isinstance(error, FileNotFoundError) and (path is None or not os.path.lexists(path))


def _explain_foreign(tar: Location, why: str) -> str:
    return f"{tar} is not a shard of the unfinished pack in {tar.folder}: {why}. Move it away or delete it"
