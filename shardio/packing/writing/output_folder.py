"""The directory of a new dataset that a program writes: what it may hold, and what marks it as unfinished."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardio.errors import PackError
from shardio.packing.locking import locked_folder
from shardio.shards import MANIFEST_NAME, UNFINISHED_NAME
from shardio.storage import parse_location
from shardio.whole_writes import find_target, remove_unfinished

MARK = b"written by a program"
"""The content of the marker. It differs from a pack's, so a pack refuses to continue here."""

SHARD_NAME = re.compile(r"shard-([0-9]{5}-)?[0-9]{6,}\.tar(\.idx)?")
"""The names of shards that shardio writes, and of their indexes."""

_OTHER_NAMES = {MANIFEST_NAME, "rejected.jsonl"}


@contextmanager
def new_dataset(out: Path, *, overwrite: bool) -> Iterator[None]:
    """Create or clear a directory, lock it and mark it as unfinished for the duration of a block.

    The block must write the manifest and remove the mark. If it raises, finished shards and the mark stay; if no shard
    is finished, nothing stays.

    Args:
        out: The directory. It must not exist or be empty, or hold a dataset that ``overwrite`` replaces.
        overwrite: Whether to remove the shards and the manifest that are there.

    Raises:
        PackError: If the directory cannot be used.
    """
    with locked_folder(out):
        _check_content(out, overwrite=overwrite)
        write_mark(out, MARK)
        _clear(out)
        try:
            yield
        except BaseException:  # Re-raised: Ctrl-C must not leave unfinished files either.
            with suppress(OSError):  # It may have been removed.
                remove_unfinished(out)
                if not any(out.glob("*.tar")):
                    (out / UNFINISHED_NAME).unlink(missing_ok=True)
            raise


def holds_unfinished(out: Path) -> bool:
    """Return whether a directory holds a dataset that a program has not finished writing."""
    mark = out / UNFINISHED_NAME
    return mark.exists() and parse_location(mark).read_whole() == MARK


def write_mark(out: Path, content: bytes) -> None:
    """Mark a directory as unfinished."""
    with parse_location(out / UNFINISHED_NAME).write_whole() as file:
        file.write(content)


def visible_names(folder: Path) -> list[str]:
    """Return the names of the files in a directory, sorted, without locks and partial files."""
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if not name.endswith(".lock") and find_target(name) is None)


def _check_content(out: Path, *, overwrite: bool) -> None:
    names = visible_names(out)
    foreign = [name for name in names if not _is_ours(name)]
    if foreign:
        raise PackError(
            f"the directory {out} holds {foreign[0]}, which shardio did not write: choose an empty directory"
        )
    if not names or overwrite:
        return
    if UNFINISHED_NAME in names:
        raise PackError(
            f"{out} holds an unfinished dataset: if nothing is writing to it, pass --overwrite (overwrite=True) to "
            "start again, or choose another directory"
        )
    raise PackError(
        f"{out} is not empty (it holds {names[0]}): choose another directory, or pass --overwrite (overwrite=True) to "
        "replace the dataset there"
    )


def _is_ours(name: str) -> bool:
    return bool(SHARD_NAME.fullmatch(name)) or name in _OTHER_NAMES or name.startswith(".shardio-")


def _clear(out: Path) -> None:
    """Remove a former dataset, the manifest first: from then on, readers refuse the directory."""
    remove_unfinished(out)
    for name in sorted(visible_names(out), key=lambda name: name != MANIFEST_NAME):
        if name != UNFINISHED_NAME:
            (out / name).unlink()
