"""Find the shards that a user names: a directory, a manifest, tars or a pattern of tars."""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from shardio.errors import FormatError, find_user_level
from shardio.shards.index import INDEX_SUFFIX, IndexHeader, index_location
from shardio.shards.indexing import TAR_LIST_NAME, find_known, find_or_make_index, read_tar_list, write_tar_list
from shardio.shards.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    ShardEntry,
    ShardTable,
    find_gaps,
    group_by_split,
    make_entry,
    make_pattern,
    read_manifest,
)
from shardio.shards.shard import Shard, was_packed
from shardio.shards.tar import BLOCK, is_added_by_macos
from shardio.storage import Location, RemoteAccess, map_locations, parse_location
from shardio.values import count

_COMPRESSED = re.compile(
    r".+\.(tar\.(gz|bz2|xz|zst|zstd|lz|lz4|lzma|lzo|z|br)|tgz|tbz|tbz2|txz|tzst|taz|tlz)", re.IGNORECASE
)


def find_tars(folder: Location, pattern: str = "*") -> list[Location]:
    """Return all files in a folder that are named ``*.tar``, in lower or upper case, sorted.

    Hidden files are skipped, except files that macOS adds (``._x.tar``), which the caller counts.

    Args:
        folder: The folder.
        pattern: A pattern of the names, in which ``*`` stands for any characters.

    Raises:
        FormatError: If the folder also holds compressed tars, whose samples would be left out.
        OSError: If the folder cannot be read.
    """
    matches = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL).fullmatch
    names = [name for each in folder.list() if matches(name := each.removesuffix("/"))]
    names = [name for name in names if not name.startswith(".") or is_added_by_macos(name)]
    compressed = [name for name in names if _COMPRESSED.fullmatch(name) and not name.startswith(".")]
    if compressed:
        more = f" and other compressed tars ({len(compressed)} in all)" if len(compressed) > 1 else ", a compressed tar"
        raise FormatError(
            f"{folder} holds {compressed[0]}{more}. shardio cannot read compressed tars and would leave their samples "
            "out: decompress them (gunzip, unzstd, …), move them elsewhere, or pass a list of the tars to read"
        )
    return [folder / name for name in names if name.lower().endswith(".tar")]


def find_indexed(folder: Location) -> list[Location]:
    """Return the tars in a folder that have an index there. The tars need not exist."""
    return [folder / name.removesuffix(INDEX_SUFFIX) for name in folder.list() if name.endswith(f".tar{INDEX_SUFFIX}")]


DatasetSource = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A directory, a manifest, a tar, a pattern of tars, or a list of tars and patterns."""

MAX_BYTES = 2**63 - 1
"""The maximum size of a dataset in bytes; bytes and samples are counted in int64."""

MIN_LISTED = 100
"""A list of a folder's tars is written if at least this many of them were newly opened."""

MAX_NAMED = 8
"""The maximum number of files that a message names."""


def open_table(source: DatasetSource, access: RemoteAccess | None = None) -> ShardTable:
    """Find the shards that ``source`` names.

    Args:
        source: A directory with a manifest, a directory with ``*.tar`` (read in sorted order), a manifest file, a
            tar, a pattern such as ``shard-{000000..000012}.tar`` or ``shard-*.tar``, or a list of tars and patterns.
            Tars without a manifest are indexed on first use. A RuntimeWarning reports tars with equal contents, gaps
            in the numbers of tars that a directory or ``*`` names, and samples whose members are not adjacent.
        access: The access to remote shards.

    Raises:
        FileNotFoundError: If the source does not exist or holds no tars, or a list names a directory.
        FormatError: If a file is invalid, a tar is named twice, or the dataset has no samples.
        OSError: If a tar cannot be read, or its index cannot be written.
        ValueError: If a name is empty.
    """
    if isinstance(source, str | os.PathLike):
        location = parse_location(source, access)
        if (location / MANIFEST_NAME).exists():
            return _table_of_manifest(location / MANIFEST_NAME)
        if location.name == TAR_LIST_NAME:
            return _table_of_folder(location.folder)
        if location.name.endswith(".json"):
            return _table_of_manifest(location)
        if location.is_folder():
            return _table_of_folder(location)
        source = [source]
    tars = [tar for pattern in source for tar in expand_pattern(pattern, access)]
    _refuse_folders(tars)
    return _table_of_tars(tars, find_known(tars))


def _table_of_folder(folder: Location) -> ShardTable:
    headers = {} if folder.store.is_local else read_tar_list(folder)
    known = {folder / name: header for name, header in headers.items()}
    tars = sorted(known, key=lambda tar: tar.name) or _list_tars(folder)
    names = [tar.name for tar in tars if not is_added_by_macos(tar.name)]
    _refuse_splits(folder, names)
    _warn_of_gaps(folder, names)
    return _table_of_tars(tars, known or find_known(tars), folder)


def _list_tars(folder: Location) -> list[Location]:
    if (folder / UNFINISHED_NAME).exists():
        raise FormatError(
            f"{folder} holds an unfinished pack: wait until it finishes or, if it was interrupted, rerun the same "
            "pack command to resume it"
        )
    tars = find_tars(folder)
    _refuse_unfinished(folder, tars)
    names = [tar.name for tar in tars if not is_added_by_macos(tar.name)]
    if not names and (inner := _find_inner_datasets(folder)):
        raise FileNotFoundError(
            f"the directory {folder} holds neither {MANIFEST_NAME} nor any *.tar, but its folders "
            f"{', '.join(inner[:MAX_NAMED])} do: pass one of them, such as {folder / inner[0]}"
        )
    if not names:
        raise FileNotFoundError(
            f"the directory {folder} holds neither {MANIFEST_NAME} nor any *.tar: pack the images first "
            "(shardio pack IMAGES OUT) or, if they are in class folders, read them with ImageFolder"
        )
    return tars


def _find_inner_datasets(folder: Location) -> list[str]:
    inner = [name[:-1] for name in folder.list() if name.endswith("/") and not name.startswith(".")]
    return sorted(name for name in inner[:100] if any(map(_is_shard, (folder / name).list())))


def _is_shard(name: str) -> bool:
    return name == MANIFEST_NAME or (name.lower().endswith(".tar") and not name.startswith("."))


def _refuse_splits(folder: Location, names: Sequence[str]) -> None:
    splits = group_by_split(names)
    if len(splits) > 1:
        found = "\n".join(
            f"  {split}: {count(len(tars), 'tar')}, {f'{tars[0]} to {tars[-1]}' if len(tars) > 1 else tars[0]}"
            for split, tars in splits.items()
        )
        raise FormatError(
            f"{folder} holds the tars of several splits:\n{found}\nThey would be read as one dataset. Pass the tars to "
            "read as a list or as a pattern, such as "
            f"{folder / make_pattern(splits.get('train') or next(iter(splits.values())))}"
        )


def _refuse_folders(tars: Sequence[Location]) -> None:
    folders = [
        str(tar) for tar, is_folder in zip(tars, map_locations(Location.is_folder, tars), strict=True) if is_folder
    ]
    if folders:
        what, remedy = (
            ("is a directory", "pass it by itself, or list the tars in it")
            if len(folders) == 1
            else ("are directories", "pass one directory by itself, or list the tars in them")
        )
        raise FileNotFoundError(
            f"a list may name only tars and patterns of tars, but {' and '.join(folders[:MAX_NAMED])} {what}: {remedy}"
        )


def _refuse_unfinished(folder: Location, tars: Sequence[Location]) -> None:
    indexed = find_indexed(folder)
    packed = [tar for tar, is_ours in zip(indexed, map_locations(was_packed, indexed), strict=True) if is_ours]
    if packed:
        lost = [tar.name for tar in packed if tar not in tars]
        raise FormatError(
            f"{folder} holds shards or indexes that shardio packed ({len(packed)}, such as {packed[0].name}), but no "
            f"{MANIFEST_NAME}{f' and no {lost[0]}' if lost else ''}: a pack or a copy is unfinished. Wait until it "
            "finishes, or copy the missing files. To read only the tars that exist, pass a list of them"
        )


def expand_pattern(pattern: str | os.PathLike[str], access: RemoteAccess | None = None) -> list[Location]:
    """Return the locations that a pattern names.

    Files in brace notation need not exist. ``*`` in a file's name stands for the tars that exist, in sorted order.

    Raises:
        FileNotFoundError: If ``*`` matches nothing, or is in the name of a folder.
        FormatError: If the tars that ``*`` matches belong to several splits, or a pack or a copy is unfinished.
    """
    from braceexpand import braceexpand

    location = parse_location(pattern, access)
    if location.exists() or location.is_folder():
        return [location]
    return [tar for name in braceexpand(os.fspath(pattern)) for tar in _match(parse_location(name, access))]


def _match(location: Location) -> list[Location]:
    if "*" not in str(location):
        return [location]
    folder = location.folder
    if "*" in str(folder):
        raise FileNotFoundError(
            f"{location} does not exist; * can stand for a part of a tar's name, but not of a folder's name"
        )
    if not (tars := find_tars(folder, location.name)):
        raise FileNotFoundError(f"no tar matches {location}")
    if not (folder / MANIFEST_NAME).exists():
        _refuse_unfinished(folder, tars)
    names = [tar.name for tar in tars]
    _refuse_splits(folder, names)
    _warn_of_gaps(folder, names)
    return tars


def _warn_of_gaps(folder: Location, names: Sequence[str]) -> None:
    """Warn if the numbering of the tars has gaps. A list of tars may leave some out on purpose."""
    if missing := find_gaps(names):
        message = f"the numbers of the tars in {folder} have gaps: {len(missing)} missing ({_name_some(missing)}). "
        warnings.warn(f"{message}Check whether a copy is unfinished", RuntimeWarning, stacklevel=find_user_level())


def _table_of_manifest(location: Location) -> ShardTable:
    if not location.exists():
        raise FileNotFoundError(f"the manifest {location} does not exist")
    manifest = read_manifest(location)
    if twice := [name for name, count in Counter(shard.name for shard in manifest.shards).items() if count > 1]:
        raise FormatError(
            f"the manifest {location} is damaged: it lists {twice[0]} twice, so its samples would be delivered twice. "
            "Download it or pack the dataset again"
        )
    _check_counts(manifest, location)
    tars = [location.folder / shard.name for shard in manifest.shards]
    return _make_table(manifest, tars, map(index_location, tars), location)


def _check_counts(manifest: Manifest, location: Location) -> None:
    """Refuse a manifest with more samples or bytes than its shards can have.

    Only the largest shard's file is checked, because the time to open a dataset must not depend on its number of
    shards. Damage to other shards is found when they are first read.
    """
    for shard in manifest.shards:
        if shard.num_samples > shard.num_bytes // BLOCK:
            raise FormatError(
                f"the manifest {location} says that {shard.name} holds {count(shard.num_samples, 'sample')} in "
                f"{shard.num_bytes} bytes, but each sample takes at least {BLOCK} bytes. Download the manifest "
                "or pack the dataset again"
            )
    if manifest.num_bytes > MAX_BYTES:
        raise FormatError(
            f"the manifest {location} says that its shards have {manifest.num_bytes} bytes, more than {MAX_BYTES}. "
            "Download it or pack the dataset again"
        )
    largest = max(manifest.shards, key=lambda shard: shard.num_bytes, default=None)
    tar = location.folder / (largest.name if largest else "")
    if largest and tar.exists() and (found := tar.stat().size) != largest.num_bytes:
        raise FormatError(
            f"the manifest {location} says that {tar} has {largest.num_bytes} bytes, but it has {found}: a copy may be "
            "unfinished. Download both again or pack the dataset again"
        )


def _table_of_tars(
    tars: list[Location], known: Mapping[Location, IndexHeader], folder: Location | None = None
) -> ShardTable:
    """Return the table of tars, given the index headers of the tars that need not be opened.

    If ``folder`` is given and many of its tars had to be opened, write the list of its tars.
    """
    named, tars = tars, [tar for tar in tars if not is_added_by_macos(tar.name)]
    if not tars:
        raise FileNotFoundError(
            f"{named[0]} is a file that macOS added, not a tar: pass a tar instead"
            if named
            else "the list of tars is empty"
        )
    if twice := [tar for tar, number in Counter(tars).items() if number > 1]:
        raise FormatError(f"{twice[0]} is named twice, so each of its samples would be delivered twice: name it once")
    others = [tar for tar in tars if tar not in known]
    exist = map_locations(Location.exists, others)
    if missing := [str(tar) for tar, exists in zip(others, exist, strict=True) if not exists]:
        raise FileNotFoundError(f"no such directory, manifest or tar: {', '.join(missing[:5])}")
    _refuse_same([tar for tar in tars if tar.store.is_local or tar not in known])
    found = map_locations(find_or_make_index, others)
    indexes = {tar: index_location(tar) for tar in known}
    indexes |= {tar: index for tar, (index, _) in zip(others, found, strict=True)}
    opened = map_locations(lambda tar: _read_header(tar, indexes[tar]), others)
    headers = {**known, **dict(zip(others, opened, strict=True))}
    entries = [make_entry(tar.name, headers[tar]) for tar in tars]
    num_skipped = sum(contents.num_added_by_macos for _, contents in found if contents is not None)
    warned = (
        _describe_skipped(len(named) - len(tars), num_skipped),
        _describe_copies(tars, entries),
        _describe_scattered({tar: headers[tar].num_scattered or 0 for tar in tars}),
    )
    for message in filter(None, warned):
        warnings.warn(message, RuntimeWarning, stacklevel=find_user_level())
    if folder is not None and folder.store.is_local and len(others) >= MIN_LISTED:
        with suppress(OSError):  # The list only saves time.
            write_tar_list(folder, {tar: headers[tar] for tar in tars if indexes[tar] == index_location(tar)})
    fields = {field for header in headers.values() for field in header.fields}
    manifest = Manifest(shards=tuple(entries), fields=tuple(sorted(fields)))
    return _make_table(manifest, tars, [indexes[tar] for tar in tars], tars[0].folder)


def _read_header(tar: Location, index: Location) -> IndexHeader:
    with Shard(tar, index) as shard:
        return shard.index.header


def _make_table(
    manifest: Manifest, tars: Iterable[Location], indexes: Iterable[Location], where: Location
) -> ShardTable:
    if manifest.num_samples == 0:
        raise FormatError(f"the dataset {where} has no samples")
    return ShardTable(manifest=manifest, tars=tuple(tars), indexes=tuple(indexes))


def _refuse_same(tars: Sequence[Location]) -> None:
    seen = dict[str, Location]()
    for tar, stat in zip(tars, map_locations(Location.stat, tars), strict=True):
        if (other := seen.setdefault(stat.identity, tar)) is not tar:
            raise FormatError(
                f"{other} and {tar} are the same file, so each of its samples would be delivered twice: name it once"
            )


def _name_some(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")


def _describe_copies(tars: Sequence[Location], entries: Sequence[ShardEntry]) -> str:
    groups = defaultdict[str, list[str]](list)
    for tar, entry in zip(tars, entries, strict=True):
        if entry.num_samples:
            groups[entry.digest].append(str(tar))
    copies = [names for names in groups.values() if len(names) > 1]
    if not copies:
        return ""
    return (
        f"these tars have equal contents: {', '.join(copies[0][:MAX_NAMED])}. Each of their samples is delivered "
        f"{len(copies[0])} times per epoch: omit the copies unless this is intended"
        f"{f' (there are {len(copies)} such groups)' if len(copies) > 1 else ''}"
    )


def _describe_scattered(counts: Mapping[Location, int]) -> str:
    tars = [str(tar) for tar, count in counts.items() if count]
    if not tars:
        return ""
    return (
        f"the members of some samples ({sum(counts.values())}) are not adjacent in {_name_some(tars)}, as happens "
        "without tar --sort=name. shardio gathers them by key, but must read each part of such a sample separately. "
        "WebDataset reads the parts as separate samples, and streams reject them. To get adjacent members, pack the "
        "tars (shardio pack), or create them with tar --sort=name"
    )


def _describe_skipped(num_tars: int, num_members: int) -> str:
    where = f"{num_members} in tars, and {num_tars} next to them"
    return f"skipped files that macOS added (._* and .DS_Store): {where}" if num_tars or num_members else ""
