"""The files of a remote folder: listed once, with what the store knows about each, and kept in a file if wanted."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shardio.errors import FormatError
from shardio.json_text import parse_json
from shardio.locks import WorkLock
from shardio.shared_list import SharedList
from shardio.storage.parallel import map_locations
from shardio.storage.paths import absolute_path, make_path
from shardio.storage.store import Location
from shardio.whole_writes import write_whole

FORMAT = "shardio listing 1"
"""The first value of a kept listing."""

PATIENCE_S = 300.0
"""How long to wait for another process that lists the same folder, in seconds. Then it is listed twice."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Listing:
    """The files in the subfolders of a folder, sorted by key.

    Attributes:
        folder: The folder.
        keys: The keys of the n files, such as ``images/cat/1.jpg``.
        sizes: int64 [n], their sizes in bytes.
        versions: Their versions, as in :class:`FileStat`.
        hashes: uint64 [n], the hashes of the keys.
        order: int64 [n], the files' numbers in the order of their hashes.
        folders: The names of the subfolders. Some may have no files.
        path: The local file that keeps the listing; None if there is none.
    """

    folder: Location
    keys: SharedList[str]
    sizes: NDArray[np.int64]
    versions: SharedList[str]
    hashes: NDArray[np.uint64]
    order: NDArray[np.int64]
    folders: tuple[str, ...]
    path: Path | None

    def __len__(self) -> int:
        return len(self.sizes)

    def find(self, key: str) -> int | None:
        """Return the number of the file with a key; None if there is none."""
        wanted = np.uint64(_hash(key))
        place = int(np.searchsorted(self.hashes, wanted, sorter=self.order))
        while place < len(self) and self.hashes[self.order[place]] == wanted:
            number = int(self.order[place])
            if self.keys[number] == key:
                return number
            place += 1
        return None


def open_listing(folder: Location, kept: str | os.PathLike[str] | None) -> Listing:
    """Return a folder's listing.

    Args:
        folder: The folder.
        kept: A local file that keeps the listing: it is read if it exists, and written otherwise. Processes that do so
            at the same time list the folder once. None to list the folder now, and keep nothing.

    Raises:
        FormatError: If the file is damaged, or keeps the listing of another folder.
        OSError: If the folder cannot be listed, or the file cannot be read or written.
    """
    if kept is None:
        return list_files(folder)
    path = absolute_path(make_path(kept))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock")
        with WorkLock(lock, PATIENCE_S, 0o644).held():
            if not path.exists():  # Otherwise, another process has listed the folder in the meantime.
                listing = list_files(folder)
                if not path.exists():  # Otherwise, one did so without the lock: all processes use the same listing.
                    if len(listing):  # A folder that is still empty is listed again the next time.
                        _save(listing, path)
                    lock.unlink(missing_ok=True)  # A process that waits for the lock finds the listing.
                    return replace(listing, path=path)
    return _load(folder, path)


def list_files(folder: Location) -> Listing:
    """List the files in the subfolders of a folder. Names that start with a dot are skipped."""
    names = [name[:-1] for name in folder.list() if name.endswith("/") and not name.startswith(".")]
    found = map_locations(_list_one, [folder / name for name in names])
    return make_listing(folder, sorted(chain.from_iterable(found)), names)


def _list_one(subfolder: Location) -> list[tuple[str, int, str]]:
    return [(key, stat.size, stat.version) for key, stat in subfolder.walk_stats()]


def make_listing(
    folder: Location, files: Sequence[tuple[str, int, str]], folders: Sequence[str], path: Path | None = None
) -> Listing:
    """Return the listing of files, given their keys, sizes in bytes and versions, sorted by key."""
    keys, sizes, versions = map(list, zip(*files, strict=True)) if files else ([], [], [])
    hashes = np.fromiter(map(_hash, keys), np.uint64, len(keys))
    return Listing(
        folder=folder,
        keys=SharedList(keys),
        sizes=np.array(sizes, np.int64),
        versions=SharedList(versions),
        hashes=hashes,
        order=np.argsort(hashes, kind="stable"),
        folders=tuple(folders),
        path=path,
    )


def _hash(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode(errors="surrogateescape"))


def _save(listing: Listing, path: Path) -> None:
    values = {
        "format": FORMAT,
        "folder": str(listing.folder),
        "folders": listing.folders,
        "keys": list(listing.keys),
        "sizes": listing.sizes.tolist(),
        "versions": list(listing.versions),
    }
    with write_whole(path) as file:
        file.write(json.dumps(values).encode())


def _check(files: Sequence[tuple[Any, Any, Any]], folders: Sequence[Any], prefix: str) -> None:
    """Raise ValueError if the values of a kept listing cannot be those of files in subfolders."""
    if not all(tuple(map(type, values)) == (str, int, str) for values in files) or set(map(type, folders)) - {str}:
        raise ValueError("a key, a size, a version or a name has the wrong type")
    if not all(0 <= size < 2**63 for _, size, _ in files):
        raise ValueError("a size is out of range")
    if not all(key.startswith(prefix) and "/" in key[len(prefix) :] for key, _, _ in files):
        raise ValueError("a key is not in a subfolder")
    if not all(one < other for (one, _, _), (other, _, _) in pairwise(files)):
        raise ValueError("the keys are not sorted, or one occurs twice")


def _load(folder: Location, path: Path) -> Listing:
    try:
        found: Any = parse_json(path.read_bytes())
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}, expected {FORMAT!r}")
        where, names = str(found["folder"]), list(found["folders"])
        files = list(zip(found["keys"], found["sizes"], found["versions"], strict=True))
        if where == str(folder):
            _check(files, names, f"{folder.key}/" if folder.key else "")
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(f"{path} is not a listing: {error}. Delete it, and it is made again") from error
    if where != str(folder):
        raise FormatError(f"{path} is the listing of {where}, not of {folder}: name another file, or delete this one")
    return make_listing(folder, files, names, path)
