"""From what a user names (a directory, a manifest, tars, a brace pattern) to a table of shards."""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardio.errors import FormatError
from shardio.shards.folder import find_tars
from shardio.shards.foreign import find_or_make_index, was_packed
from shardio.shards.index import INDEX_SUFFIX, index_path
from shardio.shards.manifest import MANIFEST_NAME, UNFINISHED_NAME, Manifest, ShardEntry, read_manifest
from shardio.shards.names import is_added_by_macos
from shardio.shards.numbering import find_gaps
from shardio.shards.shard import Shard
from shardio.shards.tar import BLOCK
from shardio.storage import absolute_path, find_url, make_path

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A directory, a manifest, a tar, a brace pattern of tars, or a list of tars and patterns."""

MAX_BYTES = 2**63 - 1
"""The size of a dataset at the most: bytes and samples are counted in int64."""

MAX_NAMED = 8
"""How many missing tars a warning names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """A dataset's manifest and where its files are; all that is needed to read it.

    Attributes:
        manifest: What the dataset holds.
        tars: The path of each shard, in manifest order.
        indexes: The path of each shard's index, likewise.
    """

    manifest: Manifest
    tars: tuple[Path, ...]
    indexes: tuple[Path, ...]


def open_table(source: Source) -> ShardTable:
    """Find the shards that ``source`` names.

    Args:
        source: A directory (with a manifest, or with ``*.tar``, taken in sorted order), a manifest file, a
            tar, a pattern in brace notation such as ``shard-{000000..000012}.tar``, or a list of these two.
            Tars without a manifest are indexed on first use. Where two tars have equal contents, a RuntimeWarning says
            so.

    Raises:
        FileNotFoundError: If there is nothing of that name, or a list names a directory.
        FormatError: If a file is not what it should be, a tar is named twice, or the dataset has no samples.
        OSError: If a tar cannot be read, or its index cannot be written.
        ValueError: If a name is empty.
    """
    if isinstance(source, str | os.PathLike):
        path = make_path(source)
        if (path / MANIFEST_NAME).is_file():
            return _table_of_manifest(path / MANIFEST_NAME)
        if path.suffix == ".json":
            return _table_of_manifest(path)
        if path.is_dir():
            if (path / UNFINISHED_NAME).exists():
                raise FormatError(f"{path} holds an unfinished pack: run the same command to resume it")
            tars = find_tars(path)
            _refuse_unfinished(path, tars)
            if all(is_added_by_macos(tar.name) for tar in tars):
                raise FileNotFoundError(
                    f"the directory {path} holds neither {MANIFEST_NAME} nor any *.tar: images must be packed first "
                    "(shardio pack IMAGES OUT), or lie in class folders and be read by ImageFolder"
                )
            # Of a directory alone: a list of tars may leave some out on purpose.
            _warn_of_gaps([tar for tar in tars if not is_added_by_macos(tar.name)])
            return _table_of_tars(tars)
        source = [source]
    tars = [path for pattern in source for path in _expand(pattern)]
    _refuse_directories(tars)
    return _table_of_tars(tars)


def _refuse_directories(tars: Sequence[Path]) -> None:
    """Raise FileNotFoundError if directories are named where tars must be."""
    folders = [str(path) for path in tars if path.is_dir()]
    if folders:
        what, which = ("is a directory", "it") if len(folders) == 1 else ("are directories", "one directory")
        raise FileNotFoundError(
            f"a list names tars and patterns of tars, and {' and '.join(folders[:MAX_NAMED])} {what}: pass {which} by "
            f"itself, or list the tars in {'it' if len(folders) == 1 else 'them'}"
        )


def _refuse_unfinished(folder: Path, tars: Sequence[Path]) -> None:
    """Raise FormatError if a directory without a manifest holds shards that shardio packed, or their indexes."""
    indexed = {path.with_name(path.name.removesuffix(INDEX_SUFFIX)) for path in folder.glob(f"*.tar{INDEX_SUFFIX}")}
    packed = sorted(tar for tar in indexed if was_packed(tar))
    if packed:
        lost = [tar.name for tar in packed if tar not in tars]
        raise FormatError(
            f"{folder} holds {len(packed)} shards or indexes that shardio packed, such as {packed[0].name}, but no "
            f"{MANIFEST_NAME}{f' and no {lost[0]}' if lost else ''}: a pack or a copy is unfinished. Wait for it, or "
            "copy the rest; to read only the tars that are there, name them in a list"
        )


def _expand(pattern: str | os.PathLike[str]) -> list[Path]:
    from braceexpand import braceexpand

    if (path := make_path(pattern)).exists():
        return [path]
    return [make_path(name) for name in braceexpand(os.fspath(pattern))]


def _table_of_manifest(path: Path) -> ShardTable:
    if not path.is_file():
        raise FileNotFoundError(f"there is no manifest {path}")
    manifest = read_manifest(path)
    if twice := [name for name, number in Counter(shard.name for shard in manifest.shards).items() if number > 1]:
        raise FormatError(f"the manifest {path} is damaged: it lists {twice[0]} twice, so its samples would come twice")
    _check_counts(manifest, path)
    tars = tuple(path.parent / shard.name for shard in manifest.shards)
    return _checked(ShardTable(manifest=manifest, tars=tars, indexes=tuple(index_path(tar) for tar in tars)), str(path))


def _check_counts(manifest: Manifest, path: Path) -> None:
    """Raise FormatError if a manifest has more samples or bytes than its shards can have.

    Of the shards only the largest one is looked at: opening a dataset must not take longer the more it has. What is
    wrong with another one is found when it is first read.
    """
    for shard in manifest.shards:
        if shard.num_samples > shard.num_bytes // BLOCK:
            raise FormatError(
                f"the manifest {path} says that {shard.name} holds {shard.num_samples} samples in {shard.num_bytes} "
                f"bytes; each sample takes at least {BLOCK}. Pack the dataset again, or fetch the manifest again"
            )
    if manifest.num_bytes > MAX_BYTES:
        raise FormatError(f"the manifest {path} says that its shards have {manifest.num_bytes} bytes, more than can be")
    largest = max(manifest.shards, key=lambda shard: shard.num_bytes, default=None)
    tar = path.parent / (largest.name if largest else "")
    if largest and tar.is_file() and (found := tar.stat().st_size) != largest.num_bytes:
        raise FormatError(
            f"the manifest {path} says that {tar} has {largest.num_bytes} bytes, and it has {found}: a copy may be "
            "unfinished. Pack the dataset again, or fetch shards and manifest together"
        )


def _table_of_tars(tars: list[Path]) -> ShardTable:
    named, tars = tars, [tar for tar in tars if not is_added_by_macos(tar.name)]
    if not tars:
        raise FileNotFoundError(f"no tar is named, only files of macOS: {named[0]}" if named else "no tar is named")
    missing = [str(tar) for tar in tars if not tar.is_file()]
    if missing:
        raise FileNotFoundError(
            f"there is no such directory, manifest or tar: {', '.join(missing[:5])}{_explain_urls(missing)}"
        )
    _refuse_same(tars)
    found = [find_or_make_index(tar) for tar in tars]
    _warn_of_skipped(len(named) - len(tars), sum(each.num_skipped for each in found))
    indexes = [each.path for each in found]
    entries, fields = list[ShardEntry](), set[str]()
    for tar, index in zip(tars, indexes, strict=True):
        with Shard(tar, index) as shard:
            entries.append(shard.entry)
            fields.update(shard.index.header.fields)
    _warn_of_copies(tars, entries)
    manifest = Manifest(shards=tuple(entries), fields=tuple(sorted(fields)))
    return _checked(ShardTable(manifest=manifest, tars=tuple(tars), indexes=tuple(indexes)), str(tars[0].parent))


def _refuse_same(tars: Sequence[Path]) -> None:
    """Raise FormatError if two names are those of one file."""
    seen = dict[tuple[int, int], Path]()
    for tar in tars:
        status = tar.stat()
        if (other := seen.setdefault((status.st_dev, status.st_ino), tar)) is not tar:
            how = f"{tar} is named twice" if other == tar else f"{other} and {tar} are the same file"
            raise FormatError(f"{how}, and each of its samples would come twice: name it once")


def _warn_of_copies(tars: Sequence[Path], entries: Sequence[ShardEntry]) -> None:
    groups = defaultdict[str, list[str]](list)
    for tar, entry in zip(tars, entries, strict=True):
        if entry.num_samples:
            groups[entry.digest].append(str(tar))
    if copies := [names for names in groups.values() if len(names) > 1]:
        message = (
            f"{' and '.join(copies[0][:MAX_NAMED])} have equal contents, so each of their samples comes "
            f"{len(copies[0])} times: leave the copies out unless that is wanted"
        )
        more = f" ({len(copies) - 1} more such groups)" if len(copies) > 1 else ""
        warnings.warn(message + more, RuntimeWarning, stacklevel=5)


def _warn_of_gaps(tars: Sequence[Path]) -> None:
    if missing := find_gaps(tars):
        named = ", ".join(missing[:MAX_NAMED]) + (", …" if len(missing) > MAX_NAMED else "")
        message = (
            f"the numbers of the tars in {tars[0].parent} have gaps; {len(missing)} are missing: {named}. Check "
            "whether a copy is unfinished"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _warn_of_skipped(num_tars: int, num_members: int) -> None:
    if num_tars or num_members:
        message = (
            f"skipped {num_tars + num_members} files that macOS added (._* and .DS_Store): {num_members} in tars, and "
            f"{num_tars} beside them"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=5)


def _explain_urls(missing: list[str]) -> str:
    return " (URLs are not read yet: download first)" if any(map(find_url, missing)) else ""


def _checked(table: ShardTable, where: str) -> ShardTable:
    """Return a table with absolute paths: what reads it may have another working directory, or none."""
    if table.manifest.num_samples == 0:
        raise FormatError(f"the dataset {where} has no samples")
    tars, indexes = (tuple(absolute_path(path) for path in paths) for paths in (table.tars, table.indexes))
    return replace(table, tars=tars, indexes=indexes)
