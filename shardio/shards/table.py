"""From what a user names (a directory, a manifest, tars, a brace pattern) to a table of shards."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardio.errors import FormatError
from shardio.shards.foreign import find_or_make_index
from shardio.shards.index import index_path
from shardio.shards.manifest import MANIFEST_NAME, UNFINISHED_NAME, Manifest, ShardEntry, read_manifest
from shardio.shards.shard import Shard

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A directory, a manifest, a tar, a brace pattern of tars, or a list of tars and patterns."""


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
            Tars without a manifest are indexed on first use.

    Raises:
        FileNotFoundError: If there is nothing of that name.
        FormatError: If a file is not what it should be, or the dataset has no samples.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        if (path / MANIFEST_NAME).is_file():
            return _table_of_manifest(path / MANIFEST_NAME)
        if path.suffix == ".json":
            return _table_of_manifest(path)
        if path.is_dir():
            if (path / UNFINISHED_NAME).exists():
                raise FormatError(f"{path} holds an unfinished pack: run the same pack again, which goes on with it")
            tars = sorted(path.glob("*.tar"))
            if not tars:
                raise FileNotFoundError(
                    f"the directory {path} holds neither {MANIFEST_NAME} nor any *.tar: images must be packed first "
                    "(shardio pack IMAGES OUT), or lie in class folders and be read by ImageFolder"
                )
            return _table_of_tars(tars)
        source = [source]
    return _table_of_tars([path for pattern in source for path in _expand(pattern)])


def _expand(pattern: str | os.PathLike[str]) -> list[Path]:
    from braceexpand import braceexpand

    if Path(pattern).exists():
        return [Path(pattern)]
    return [Path(name) for name in braceexpand(os.fspath(pattern))]


def _table_of_manifest(path: Path) -> ShardTable:
    if not path.is_file():
        raise FileNotFoundError(f"there is no manifest {path}")
    manifest = read_manifest(path)
    tars = tuple(path.parent / shard.name for shard in manifest.shards)
    return _checked(ShardTable(manifest=manifest, tars=tars, indexes=tuple(index_path(tar) for tar in tars)), str(path))


def _table_of_tars(tars: list[Path]) -> ShardTable:
    missing = [str(tar) for tar in tars if not tar.is_file()]
    if missing or not tars:
        raise FileNotFoundError(
            f"there is no such directory, manifest or tar: {', '.join(missing[:5])}{_explain_urls(missing)}"
        )
    indexes = [find_or_make_index(tar) for tar in tars]
    entries, fields = list[ShardEntry](), set[str]()
    for tar, index in zip(tars, indexes, strict=True):
        with Shard(tar, index) as shard:
            entries.append(shard.entry)
            fields.update(shard.index.header.fields)
    manifest = Manifest(shards=tuple(entries), fields=tuple(sorted(fields)))
    return _checked(ShardTable(manifest=manifest, tars=tuple(tars), indexes=tuple(indexes)), str(tars[0].parent))


def _explain_urls(missing: list[str]) -> str:
    # A Path has one of the two slashes.
    return (
        " (URLs are not read yet: download first)" if any(re.match(r"\w[\w+.-]+:/", name) for name in missing) else ""
    )


def _checked(table: ShardTable, where: str) -> ShardTable:
    if table.manifest.num_samples == 0:
        raise FormatError(f"the dataset {where} has no samples")
    return table
