"""The folder of a new dataset that a program writes: what it may hold, and what marks it as unfinished."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardio.errors import PackError
from shardio.packing.destination import UnfinishedDataset, read_mark
from shardio.packing.folders.folder import DatasetFolder
from shardio.shards import MANIFEST_NAME, UNFINISHED_NAME
from shardio.whole_writes import find_target

MARK = b"written by a program"
"""The start of the mark. It differs from a pack's, so a pack refuses to continue here."""

SHARD_NAME = re.compile(r"shard-([0-9]{5}-)?[0-9]{6,}\.tar(\.idx)?")
"""The names of shards that shardio writes, and of their indexes."""

_OTHER_NAMES = {MANIFEST_NAME, "rejected.jsonl"}


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
                if is_empty and read_mark(folder) == unfinished.mark:  # Not that of another writer.
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
    """Remove a former dataset, the manifest first: from then on, readers refuse the folder."""
    folder.remove_partial()
    (folder.location / MANIFEST_NAME).remove()
    folder.remove([name for name in whole_names(folder) if name not in (MANIFEST_NAME, UNFINISHED_NAME)])
