"""Find the shards that a user names without opening them, so that those that are damaged are found, too."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from shardio.errors import FormatError
from shardio.shards.folder import find_tars
from shardio.shards.foreign import find_index, was_packed
from shardio.shards.index import INDEX_SUFFIX, index_location
from shardio.shards.manifest import MANIFEST_NAME, UNFINISHED_NAME, Manifest, ShardEntry, read_manifest
from shardio.shards.names import is_added_by_macos
from shardio.shards.problems import Problem
from shardio.shards.sources import DatasetSource, expand_pattern
from shardio.storage import Location, RemoteAccess, parse_location


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedShard:
    """A shard that may be damaged or incomplete.

    Attributes:
        tar: The location of its tar.
        index: The location of its index; None if it has none.
        num_bytes: The size of the tar in bytes; 0 if it does not exist.
        manifest: The location of the manifest that lists the shard; None if there is none.
        entry: Its entry there.
        fields: The fields of the whole dataset according to the manifest.
    """

    tar: Location
    index: Location | None
    num_bytes: int
    manifest: Location | None = None
    entry: ShardEntry | None = None
    fields: tuple[str, ...] = ()


def find_shards(source: DatasetSource, access: RemoteAccess | None = None) -> tuple[list[NamedShard], list[Problem]]:
    """Find the shards that a source names, and the problems that show without opening them.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars.
    """
    if not isinstance(source, str | os.PathLike):
        return _name_tars([tar for pattern in source for tar in expand_pattern(pattern, access)])
    location = parse_location(source, access)
    if location.is_folder():
        return _find_in_folder(location, location / MANIFEST_NAME)
    if location.name.endswith(".json"):
        if not location.exists():
            raise FileNotFoundError(f"the manifest {location} does not exist")
        return _find_in_folder(location.folder, location)
    return _name_tars(expand_pattern(source, access))


def _name_tars(tars: list[Location]) -> tuple[list[NamedShard], list[Problem]]:
    shards, problems = [_name_shard(tar) for tar in tars], list[Problem]()
    missing = [tar for tar in tars if not tar.exists()]
    if tars == missing:
        raise FileNotFoundError(
            f"no such directory, manifest or tar: {', '.join(map(str, tars[:5])) or '(an empty list)'}"
        )
    problems += [Problem(kind="missing", where=str(tar), message="the tar does not exist") for tar in missing]
    return [shard for shard in shards if shard.tar not in missing], problems


def _find_in_folder(folder: Location, manifest: Location) -> tuple[list[NamedShard], list[Problem]]:
    names = [name for name in folder.list() if not name.endswith("/")]
    problems = list[Problem]()
    if (folder / UNFINISHED_NAME).exists():
        message = "the pack into this directory is unfinished: rerun the same pack command to resume it"
        problems.append(Problem(kind="unfinished", where=str(folder), message=message))
    try:
        tars = [tar for tar in find_tars(folder) if not is_added_by_macos(tar.name)]
    except FormatError as error:
        problems.append(Problem(kind="unlisted", where=str(folder), message=str(error)))
        tars = [folder / name for name in names if name.lower().endswith(".tar") and not name.startswith(".")]
    entries, fields, unlisted = dict[str, ShardEntry](), tuple[str, ...](), tars
    if manifest.exists():
        try:
            found = read_manifest(manifest)
        except FormatError as error:
            message = str(error).replace(str(manifest), "it", 1).removeprefix("the manifest ")
            problems.append(Problem(kind="manifest", where=str(manifest), message=message))
        else:
            problems += _check_manifest(manifest, found, tars)
            entries, fields, unlisted = {entry.name: entry for entry in found.shards}, found.fields, []
    elif any(map(_was_packed, tars)):
        message = "the manifest does not exist, but shardio packed the tars: rebuild it with shardio repair"
        problems.append(Problem(kind="manifest", where=str(manifest), message=message))
    shards = [_name_shard(folder / entry.name, manifest, entry, fields) for entry in entries.values()]
    shards += [_name_shard(tar) for tar in unlisted]
    tar_names = {*entries, *(tar.name for tar in tars)}
    for name in names:
        if name.endswith(f".tar{INDEX_SUFFIX}") and name.removesuffix(INDEX_SUFFIX) not in tar_names:
            message = f"there is an index, {name}, but no such tar"
            where = str(folder / name.removesuffix(INDEX_SUFFIX))
            problems.append(Problem(kind="missing", where=where, message=message))
    if not shards and not problems:
        raise FileNotFoundError(f"the directory {folder} holds neither {MANIFEST_NAME} nor any *.tar")
    return shards, problems


def _check_manifest(location: Location, manifest: Manifest, tars: list[Location]) -> list[Problem]:
    """Compare a manifest with the tars in its folder."""
    where, problems = str(location), list[Problem]()
    counts = Counter(entry.name for entry in manifest.shards)
    problems += [
        Problem(kind="manifest", where=where, message=f"it lists {name} {num_times} times")
        for name, num_times in counts.items()
        if num_times > 1
    ]
    problems += [
        Problem(kind="unlisted", where=str(tar), message=f"the tar is not in {location.name}, so nothing reads it")
        for tar in tars
        if tar.name not in counts
    ]
    return problems


def _name_shard(
    tar: Location,
    manifest: Location | None = None,
    entry: ShardEntry | None = None,
    fields: tuple[str, ...] = (),
) -> NamedShard:
    index = find_index(tar)
    if manifest is not None and index != index_location(tar):  # Readers of packed shards look nowhere else.
        index = None
    try:
        num_bytes = tar.stat().size
    except OSError:
        num_bytes = 0
    return NamedShard(tar=tar, index=index, num_bytes=num_bytes, manifest=manifest, entry=entry, fields=fields)


def _was_packed(tar: Location) -> bool:
    """Return whether ``pack`` wrote a tar, as far as its files can be read."""
    with suppress(FormatError, OSError):
        return was_packed(tar)
    return False
